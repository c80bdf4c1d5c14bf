"""Summaries, comparisons, calibrations and imported reports of hand-made runs, next to those of before.

A figure that changes changes a line of ``reference_runs.json``: python -m tests.unit.results.test_reference_runs writes
the file, whose difference is read before it is committed.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakedist.report.content.comparison import comparison_object
from fakedist.results.building import write_run
from fakedist.results.comparison import Comparison
from fakedist.results.opening import open_run
from fakedist.rundir.plain import to_plain
from fakedist.traces.nsys_report import read_report
from fakedist.traces.one_step import StepChoice
from tests.extras.calibration.made_up_step import Launched, Tracing, step
from tests.extras.calibration.test_calibrating import calibrated
from tests.unit.analysis.recorded import KIB, MIB
from tests.unit.cost_model.test_reference_prices import six_digits
from tests.unit.report import handmade
from tests.unit.report.two_runs import run_of
from tests.unit.traces.nsys_made_up import MAIN, training

REFERENCE = Path(__file__).parent / "reference_runs.json"


def comparisons(folder: Path) -> Iterator[tuple[str, object]]:
    one = run_of(folder / "one")
    for number, other in enumerate(
        (
            {"activation": 12 * MIB, "line": 212},
            {"num_layers": 5, "mlp": "ffn", "activation": 700 * KIB},
        )
    ):
        compared = Comparison(one, run_of(folder / f"other{number}", **other))
        yield from ((f"{number} {name}", value) for name, value in comparison_object(compared).items())
    timed = Comparison(handmade.timed(folder / "timed"), handmade.measured(folder / "measured"))
    yield from ((f"timed {name}", value) for name, value in comparison_object(timed).items())


def summaries(folder: Path) -> Iterator[tuple[str, object]]:
    for make in (handmade.out_of_memory, handmade.ranged, handmade.overlapping):
        summary = to_plain(open_run(make(folder / make.__name__)).summary)
        yield from ((f"{make.__name__} {name}", value) for name, value in summary.items())


def calibrations(folder: Path) -> Iterator[tuple[str, object]]:
    def lost(at: int, launch: Launched) -> Launched | None:
        return None if at in (4, 5, 11, 27, 40, 61, 62) else launch

    def longer(at: int, launch: Launched) -> Launched:
        return dataclasses.replace(launch, grid="16,1,16", duration_us=60.0 + at) if at % 9 == 2 else launch

    for name, tracing, traced in (
        ("lost", Tracing(changed=lost), step() * 2),
        ("lost, with inputs", Tracing(changed=lost, with_inputs=True), step()[7:] + step()),
        ("changed", Tracing(changed=longer), step() * 3),
        ("without operations", Tracing(with_operations=False, nccl_every=3), step() + step()[:30]),
    ):
        (folder / name).mkdir()
        for field, value in to_plain(calibrated(folder / name, tracing, traced)).items():
            if isinstance(value, dict) and isinstance(origin := value.get("origin"), dict):
                origin["date"] = ""  # that of the file, which is today's
            yield f"{name} {field}", value


def reports(folder: Path) -> Iterator[tuple[str, object]]:
    report = training()
    report.calls += [(1170, 500, MAIN), (1180, 501, MAIN), (1190, 502, MAIN), (1195, 503, MAIN), (7600, 504, MAIN)]
    report.copies += [(1400, 1500, 500, 4096, 1), (1600, 1700, 501, 4096, 8)]
    report.graphs += [(1800, 1900, 502)]
    report.events += [(7, 503, 21), (9, 504, 22)]
    report.waits += [(1500, 1510, 9, 503, 2, 21), (7600, 7610, 7, 504, 3, 0), (7620, 7650, 7, 504, 1, 22)]
    report.waits += [(7660, 7670, 7, 504, 4, 0)]
    path = report.write(folder / "report.sqlite")
    (folder / "run").mkdir()
    write_run(read_report(path, path, StepChoice(step=3)), folder / "run")
    run = open_run(folder / "run")
    for name in ("kernels", "layers", "launches", "layer_times", "ranges"):
        if run.has(name):
            for number, row in enumerate(run.table(name).astype(object).to_numpy().tolist()):
                yield f"{name} {number}", row
    yield "summary", to_plain(run.summary.kernels)


SECTIONS: dict[str, Callable[[Path], Iterator[tuple[str, object]]]] = {
    "comparisons": comparisons, "summaries": summaries, "calibrations": calibrations, "reports": reports,
}  # fmt: skip


def shown(section: str, folder: Path) -> dict[str, object]:
    """A section as JSON has it."""
    folder.mkdir(exist_ok=True)
    text = json.dumps({name: six_digits(value) for name, value in SECTIONS[section](folder)}, default=str)
    said: dict[str, object] = json.loads(text.replace(str(folder), ""))
    return said


@pytest.mark.parametrize("section", SECTIONS)
def test_runs_say_what_they_said(section: str, tmp_path: Path) -> None:
    expected, said = json.loads(REFERENCE.read_text())[section], shown(section, tmp_path)
    assert {name: value for name, value in said.items() if expected.get(name) != value} == {}
    assert list(said) == list(expected)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as written_in:
        REFERENCE.write_text(
            json.dumps({name: shown(name, Path(written_in) / name) for name in SECTIONS}, indent=0) + "\n"
        )
