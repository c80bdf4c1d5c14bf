from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.report.content.memory import outside_blocks
from fakedist.report.content.report_blocks import Facts
from fakedist.report.content.run import run_report
from fakedist.report.render.markdown import report_markdown
from fakedist.results.opening import open_run
from fakedist.results.verdict import span_text, verdict
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.summary import Communicator, Outside, Summary
from tests.unit.report.handmade import ended_well, summary_of_nothing
from tests.unit.report.reading import page

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


def figures(outside: Outside) -> list[tuple[str, str, str]]:
    (facts,) = (block for block in outside_blocks(outside) if isinstance(block, Facts))
    return [(fact.name, fact.text, fact.more) for fact in facts.rows]


FITS = "fits (0 steps recorded), headroom 10.00 GiB"
HINT = "; --reserve 2048MiB shows what PyTorch does with the rest"
UNSURE = "1.00 GiB is not reserved, but NCCL takes"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (summary(70, 1, 2), f"{FITS}, 1.00 to 2.00 GiB of it for NCCL, estimated: 8.00 to 9.00 GiB is left"),
        (summary(70, 0, 0), FITS),
        (replace(summary(70, 0, 0), estimated_outside=None), FITS),
        (summary(79, 0.5, 2), f"may not fit: {UNSURE} 512.00 MiB to 2.00 GiB, estimated{HINT}"),
        (summary(79, 1.5, 2, fits=False), f"does not fit: {UNSURE} 1.50 to 2.00 GiB, estimated"),
        (summary(81, 1.5, 2, fits=False), "does not fit: it takes 81.00 GiB, 1.00 GiB more than the GPU has"),
    ],
)
def test_the_verdict_has_one_headroom_and_is_certain_where_the_estimate_decides_nothing(
    found: Summary, text: str
) -> None:
    said = verdict(found, "")
    assert said is not None
    assert said.word + said.more == text
    assert said.fits == ("does not" not in text)
    assert said.is_sure == ("may not" not in text)


def test_page_and_markdown_have_the_section_with_every_communicator(tmp_path: Path) -> None:
    run = open_run(ended_well(tmp_path / "run"))
    text = page(run)
    assert '<section id="outside"' in text
    assert "default_pg" in text[text.index('id="communicators"') :]
    assert "NVLink SHARP 256.00 MiB" in text or "made of, at most" in text
    assert "- CUDA context: not known for NVIDIA H100 80GB HBM3" in report_markdown(run_report(run))


def test_measured_and_estimated_stand_apart() -> None:
    found = summary(70, 1, 2, measured_bytes=GIB)
    assert found.estimated_outside is not None
    rows = {name: figure for name, figure, _ in figures(found.estimated_outside)}
    assert rows == {"NCCL": "1.00 to 2.00 GiB", "on this GPU": "1.00 GiB"}


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(GIB, GIB, "1.00 GiB"), (GIB, 3 * GIB, "1.00 to 3.00 GiB"), (1 << 20, GIB, "1.00 MiB to 1.00 GiB")],
)
def test_a_span_has_its_unit_once(low: int, high: int, text: str) -> None:
    assert span_text(low, high) == text


def test_what_the_script_took_is_told_apart_and_measured() -> None:
    found = summary(70, 0, 0)
    assert found.estimated_outside is not None
    taken = {"user buffers": GIB, "extensions": GIB // 2}
    owned = replace(found.estimated_outside, low_bytes=GIB, high_bytes=GIB, taken=taken, taken_bytes=GIB)
    assert ("user buffers", "1.00 GiB", "measured: the most at one time") in figures(owned)
    said = verdict(replace(found, estimated_outside=owned), "")
    assert said is not None
    assert (
        said.word + said.more == f"{FITS}, 1.00 GiB of it for user buffers and extensions, measured: 9.00 GiB is left"
    )
    full = replace(found, estimated_outside=owned, peak_reserved_bytes=80 * GIB - 1, fits=False)
    assert "user buffers and extensions take 1.00 GiB, measured" in getattr(verdict(full, ""), "more", "")
