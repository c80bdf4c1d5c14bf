from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.report.page.run_page import page
from fakedist.report.text.memory_sheets import outside_figures
from fakedist.report.text.run_report import run_markdown
from fakedist.report.text.wording import span_text, verdict
from fakedist.results.opening import open_run
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.summary import Communicator, Outside, Summary
from tests.unit.report.handmade import ended_well, summary_of_nothing

GIB = 1 << 30


def summary(reserved: int, low: float, high: float, fits: bool = True, measured_bytes: int | None = None) -> Summary:
    low_bytes, high_bytes = int(low * GIB), int(high * GIB)
    one = Communicator("tp", 8, 8, 1, (1, 1), parts={}, low_bytes=low_bytes, high_bytes=high_bytes)
    outside = Outside(
        low_bytes,
        high_bytes,
        None,
        "",
        "2.30.7",
        nccl_environment={},
        communicators=[one] if high else [],
        num_unused_groups=2,
        left_out=["CUDA context: not known for this GPU"],
        measured_bytes=measured_bytes,
    )
    return replace(
        summary_of_nothing(),
        exit=Ending(Outcome.STOPPED, 0),
        fits=fits,
        capacity_bytes=80 * GIB,
        peak_reserved_bytes=reserved * GIB,
        estimated_outside=outside,
    )


def told(found: Summary) -> str:
    said = verdict(found, "")
    assert said is not None
    return said.word + said.more


def test_a_fit_says_its_headroom_once_and_what_nccl_takes_of_it() -> None:
    assert told(summary(70, 1, 2)) == (
        "fits (0 steps recorded), headroom 10.00 GiB, 1.00 to 2.00 GiB of it for NCCL, estimated"
    )
    assert told(summary(70, 0, 0)) == "fits (0 steps recorded), headroom 10.00 GiB"


def test_a_fit_that_depends_on_the_estimate_is_not_certain() -> None:
    found = summary(79, 0.5, 2)
    assert told(found) == "may not fit: 1.00 GiB is not reserved, but NCCL takes 512.00 MiB to 2.00 GiB, estimated"
    said = verdict(found, "")
    assert said is not None
    assert said.fits
    assert not said.is_sure


def test_what_does_not_even_fit_the_least_estimate_does_not_fit() -> None:
    assert told(summary(79, 1.5, 2, fits=False)).startswith("does not fit: 1.00 GiB is not reserved, but NCCL takes")
    assert told(summary(81, 1.5, 2, fits=False)) == "does not fit: it takes 81.00 GiB, 1.00 GiB more than the GPU has"


def test_without_an_estimate_there_is_one_headroom() -> None:
    assert told(replace(summary(70, 0, 0), estimated_outside=None)) == "fits (0 steps recorded), headroom 10.00 GiB"


def test_page_and_markdown_have_the_section_with_every_communicator(tmp_path: Path) -> None:
    run = open_run(ended_well(tmp_path / "run"))
    text = page(run)
    assert '<section id="outside"' in text
    assert text.count('<th scope="row">default_pg</th>') >= 1
    assert "NVLink SHARP 256.00 MiB" in text
    assert "- left out: **CUDA context** (not known for NVIDIA H100 80GB HBM3)" in run_markdown(run)


def test_measured_and_estimated_stand_apart() -> None:
    found = summary(70, 1, 2, measured_bytes=GIB)
    assert found.estimated_outside is not None
    rows = {name: figure for name, figure, _ in outside_figures(found.estimated_outside)}
    assert rows == {"NCCL": "1.00 to 2.00 GiB", "on this GPU": "1.00 GiB", "left out": "CUDA context"}


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(GIB, GIB, "1.00 GiB"), (GIB, 3 * GIB, "1.00 to 3.00 GiB"), (1 << 20, GIB, "1.00 MiB to 1.00 GiB")],
)
def test_a_span_has_its_unit_once(low: int, high: int, text: str) -> None:
    assert span_text(low, high) == text
