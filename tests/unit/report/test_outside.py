"""What is said of the memory outside of the caching allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.report.html import page
from fakedist.report.outside import outside_figures
from fakedist.report.run import Run
from fakedist.report.run_markdown import run_markdown
from fakedist.report.wording import span_text, verdict
from tests.unit.report.handmade import ended_well

GIB = 1 << 30


def summary(reserved: int, low: float, high: float, fits: bool = True, **outside: Any) -> dict[str, Any]:
    communicator = {"low_bytes": int(low * GIB), "high_bytes": int(high * GIB)}
    found = {
        "low_bytes": int(low * GIB),
        "high_bytes": int(high * GIB),
        "context_bytes": None,
        "communicators": [communicator] if high else [],
        "nccl_version": "2.30.7",
        "nccl_environment": {},
        "num_unused_groups": 2,
        "left_out": ["CUDA context: not known for this GPU"],
        "measured_bytes": None,
        **outside,
    }
    return {
        "peak_reserved_bytes": reserved * GIB,
        "capacity_bytes": 80 * GIB,
        "out_of_memory": None,
        "exit": {"outcome": "stopped", "code": 0, "message": ""},
        "fits": fits,
        "estimated_outside": found,
    }


def told(found: dict[str, Any]) -> str:
    said = verdict(found, "")
    assert said is not None
    return said.word + said.more


def test_a_fit_has_both_headrooms() -> None:
    assert told(summary(70, 1, 2)) == "fits, headroom 10.00 GiB; 8.00 to 9.00 GiB beside NCCL, estimated"
    assert told(summary(70, 0, 0)) == "fits, headroom 10.00 GiB"


def test_a_fit_that_hangs_on_the_estimate_is_no_fit_for_sure() -> None:
    found = summary(79, 0.5, 2)
    assert told(found) == "may not fit: 1.00 GiB are not reserved, and NCCL takes 512.00 MiB to 2.00 GiB, estimated"
    said = verdict(found, "")
    assert said is not None
    assert said.fits
    assert not said.is_sure


def test_what_does_not_even_fit_the_least_estimate_does_not_fit() -> None:
    assert told(summary(79, 1.5, 2, fits=False)).startswith("does not fit: 1.00 GiB are not reserved, and NCCL takes")
    assert told(summary(81, 1.5, 2, fits=False)) == "does not fit: it takes 81.00 GiB, 1.00 GiB more than the GPU has"


def test_a_run_of_an_older_fakedist_says_what_it_said() -> None:
    assert told(summary(70, 0, 0) | {"estimated_outside": None}) == "fits, headroom 10.00 GiB"


def test_page_and_markdown_have_the_section_with_every_communicator(tmp_path: Path) -> None:
    run = Run(ended_well(tmp_path / "run"))
    text = page(run)
    assert '<section id="outside"' in text
    assert text.count('<th scope="row">default_pg</th>') >= 1
    assert "NVLink SHARP 256.00 MiB" in text
    assert "- left out: **CUDA context** (not known for NVIDIA H100 80GB HBM3)" in run_markdown(run)


def test_a_run_directory_of_an_older_fakedist_has_no_section(tmp_path: Path) -> None:
    directory = ended_well(tmp_path / "run")
    manifest = json.loads((directory / "run.json").read_text())
    del manifest["summary"]["estimated_outside"]
    (directory / "run.json").write_text(json.dumps(manifest))
    assert 'id="outside"' not in page(Run(directory))
    assert "Outside of" not in run_markdown(Run(directory))


def test_measured_and_estimated_stand_apart() -> None:
    rows = {name: figure for name, figure, _ in outside_figures(summary(70, 1, 2, measured_bytes=GIB))}
    assert rows == {
        "NCCL": "1.00 to 2.00 GiB",
        "headroom": "8.00 to 9.00 GiB",
        "on this GPU": "1.00 GiB",
        "left out": "CUDA context",
    }


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(GIB, GIB, "1.00 GiB"), (GIB, 3 * GIB, "1.00 to 3.00 GiB"), (1 << 20, GIB, "1.00 MiB to 1.00 GiB")],
)
def test_a_span_has_its_unit_once(low: int, high: int, text: str) -> None:
    assert span_text(low, high) == text
