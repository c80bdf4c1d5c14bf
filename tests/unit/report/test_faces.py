"""Every face of a report, as it was: of each subject the terminal's at 100 columns, Markdown, JSON, CSV and the page.

``pytest --snapshot-update FILE`` writes those that changed, and their difference is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Protocol

import pytest
from syrupy.assertion import SnapshotAssertion

from fakedist.check.outputs import check_report
from fakedist.cli import main
from fakedist.cli.output import CSV, HTML, JSON, MARKDOWN, TEXT, Output
from fakedist.report.content.job import runs_report, step_report
from fakedist.report.content.report_blocks import Report
from fakedist.sweep.sheets import sweep_report
from fakedist.units import MIB
from tests.unit.report import subjects
from tests.unit.report.content.test_job import faster, placed
from tests.unit.report.handmade import measured, timed
from tests.unit.report.render.test_terminal import crowded
from tests.unit.report.two_runs import run_of
from tests.unit.report.two_snapshots import snapshot_of
from tests.unit.results.test_lines import run_with_lines
from tests.unit.results.test_repricing import STEP, priced_run
from tests.unit.sweep.test_sheets import ROWS, sweep
from tests.unit.traces.test_inferring import Allocating

FORMATS = (TEXT, MARKDOWN, JSON)
_NOT_READ = re.compile(r"<(script|style).*?</\1>|<!--.*?-->", re.DOTALL)
_CELL = re.compile(r"</t[dh]>\s*<t[dh]\b[^>]*>")
_BLOCK = re.compile(r"</?(?:p|div|h\d|li|ul|tr|table|section|dd|dt|dl|header|nav|footer|button|title)\b[^>]*>")
#: What no two runs of these tests share.
_COMMAND, _WHEN = re.compile(r"(?<=\ncommand\n).*", re.MULTILINE), re.compile(r"\d{4}-\d\d-\d\dT[\d:+]+")


def read(page: str) -> str:
    """The words of a page, a line for each element that stands apart."""
    words = unescape(re.sub(r"<[^>]*>", "", _BLOCK.sub("\n", _CELL.sub(" | ", _NOT_READ.sub("", page)))))
    text = "\n".join(line for line in (" ".join(line.split()) for line in words.splitlines()) if line)
    return _WHEN.sub("WHEN", _COMMAND.sub("...", text))


@pytest.fixture(autouse=True)
def _at_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


class Shown(Protocol):
    def __call__(self, form: str, *arguments: str) -> str: ...


@pytest.fixture
def shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shown:
    """A command's output in a format, with its last line and exit code."""
    monkeypatch.chdir(tmp_path)

    def run(form: str, *arguments: str) -> str:
        code = main([*arguments, "--format", form])
        printed = capsys.readouterr()
        out = read(printed.out) + "\n" if form == HTML else printed.out
        folder = re.escape(str(tmp_path)).replace("_", r"\\?_")  # Markdown has backslashes before underscores
        return re.sub(folder, "/runs", f"{out}{printed.err}exit {code}")

    return run


def steps(folder: str = ".") -> None:
    """The runs of two ranks of a job, which make unlike calls."""
    run_of(Path(folder) / "rank0", gemm_us=100, rank=0)
    run_of(Path(folder) / "rank4", gemm_us=100, activation=12 * MIB, rank=4)


def test_lines(shown: Shown, snapshot: SnapshotAssertion) -> None:
    """The first run has a line whose name a terminal cannot show, the second has no times, the third no step."""
    run_with_lines(Path("run"))
    timed(Path("measured"), "measured")
    snapshot_of(Path("a.pickle"), [(7, 8 * MIB), (0, 4 * MIB)])
    for name in ("run", "measured", "a.pickle"):
        for form in (TEXT, JSON):
            assert shown(form, "lines", name) == snapshot(name=f"{name}-{form}")


def test_match(shown: Shown, snapshot: SnapshotAssertion) -> None:
    run_of(Path("runs/rank0"), rank=0)
    run_of(Path("runs/rank1"), activation=12 * MIB, rank=1)
    run_of(Path("alike/rank0"), rank=0)
    run_of(Path("alike/rank1"), rank=1, line=14, ended="exception")
    for form in FORMATS:
        assert shown(form, "match", "runs") == snapshot(name=form)
        assert shown(form, "match", "alike") == snapshot(name=f"alike-{form}")


def test_ranks_of_a_job(shown: Shown, snapshot: SnapshotAssertion) -> None:
    steps("runs")
    for form in (TEXT, MARKDOWN, HTML):
        assert shown(form, "report", "runs") == snapshot(name=form)
    printed = shown(JSON, "report", "runs")
    whole = json.loads(printed[: printed.rindex("}") + 1])
    assert whole | {"ranks": [sorted(rank) for rank in whole["ranks"]]} == snapshot(name=JSON)


def test_two_runs(shown: Shown, snapshot: SnapshotAssertion) -> None:
    run_of(Path("a"), gemm_us=100)
    run_of(Path("b"), gemm_us=140, activation=12 * MIB, mlp="ffn", arguments=("--wide",))
    for form in (*FORMATS, HTML):
        assert shown(form, "compare", "a", "b") == snapshot(name=form)


def test_two_alike_runs_with_all_rows(shown: Shown, snapshot: SnapshotAssertion) -> None:
    run_of(Path("a"), gemm_us=100)
    run_of(Path("b"), gemm_us=100.004, source="measured")
    for form in (TEXT, MARKDOWN):
        assert shown(form, "compare", "a", "b", "--all-rows") == snapshot(name=form)


def test_two_snapshots(shown: Shown, snapshot: SnapshotAssertion) -> None:
    snapshot_of(Path("a.pickle"), [(7, 8 * MIB), (9, 4 * MIB)])
    snapshot_of(Path("b.pickle"), [(7, 12 * MIB), (0, 2 * MIB)])
    for form in (*FORMATS, HTML):
        assert shown(form, "compare", "a.pickle", "b.pickle") == snapshot(name=form)


def test_three_runs(shown: Shown, snapshot: SnapshotAssertion) -> None:
    run_of(Path("a"), gemm_us=100)
    run_of(Path("b"), gemm_us=100, activation=12 * MIB, arguments=("--wide",), ended="exception")
    run_of(Path("c"), gemm_us=140, source="measured", num_steps=3)
    for form in (*FORMATS, HTML):
        assert shown(form, "compare", "a", "b", "c") == snapshot(name=form)


def test_topology(shown: Shown, snapshot: SnapshotAssertion) -> None:
    steps()
    for form in FORMATS:
        assert shown(form, "report", "rank0", "--section", "communication") == snapshot(name=form)


def test_rollout(shown: Shown, snapshot: SnapshotAssertion) -> None:
    priced_run(Path("run"), *STEP)
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    engine = {"model_type": "llama", **sizes, "num_attention_heads": 32, "num_key_value_heads": 8}
    Path("config.json").write_text(json.dumps(engine))
    asked = ("--lengths", "100", "--requests", "4", "--prompt-tokens", "9", "--kv-tokens", "999")
    for form in FORMATS:
        printed = shown(form, "time", "run", "--engine", "config.json", *asked)
        start = printed.index('"rollout":' if form == JSON else "Rollout of one engine")
        assert printed[start:] == snapshot(name=form)


def faces(report: Report, *forms: str) -> Iterator[tuple[str, str]]:
    """A report in each of these formats, else in all."""
    for form in forms or (*FORMATS, CSV, HTML):
        output = Output(form)
        with redirect_stdout(StringIO()) as text:
            output.write(report)
        yield form, read(text.getvalue()) if form == HTML else text.getvalue()


def test_checked(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    for has_failures in (True, False):
        found = subjects.checked(tmp_path / str(has_failures))
        if not has_failures:
            found.failures.clear()
        for form, text in faces(check_report(found), *FORMATS, HTML):
            assert text == snapshot(name=f"{has_failures}-{form}")


def test_sweep(snapshot: SnapshotAssertion) -> None:
    for form, text in faces(sweep_report(sweep(*ROWS))):
        assert text == snapshot(name=form)


def test_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    monkeypatch.chdir(tmp_path)
    steps("runs")
    Path("runs/rank4/report.html").touch()
    found = placed(tmp_path / "runs")
    assert found.job is not None
    reports = {
        "whole": runs_report(found, folder=tmp_path / "runs"),
        "what-if": step_report(found.job, {"bandwidth=2x": faster()}),
    }
    for name, report in reports.items():
        for form, text in faces(report, *((TEXT, MARKDOWN, HTML) if name == "whole" else (*FORMATS, HTML))):
            assert text.replace(str(tmp_path), "/runs") == snapshot(name=f"{name}-{form}")


def test_run(shown: Shown, snapshot: SnapshotAssertion) -> None:
    """A run that does not fit, one with all that few have, one of a real GPU, a snapshot and a trace."""
    for name, make in {"crowded": crowded, "rich": subjects.full_run, "measured": measured}.items():
        make(Path(name))
    snapshot_of(Path("a.pickle"), [(7, 8 * MIB), (0, 4 * MIB)])
    trace = Allocating()
    for step in (1, 2):
        trace.step(step)
    trace.write(Path())
    for name in ("crowded", "rich", "measured", "a.pickle", "t.json"):
        for form in (TEXT, MARKDOWN, HTML):
            assert shown(form, "report", name) == snapshot(name=f"{name}-{form}")
        assert shown(TEXT, "report", name, "--full") == snapshot(name=f"{name}-full")


def test_time(shown: Shown, snapshot: SnapshotAssertion) -> None:
    priced_run(Path("run"), *STEP)
    for form in (TEXT, MARKDOWN):
        assert shown(form, "time", "run", "--what-if", "host=2x") == snapshot(name=form)
        assert shown(form, "time", "run", "--gpu", "h100,b200") == snapshot(name=f"gpus-{form}")
    printed = shown(JSON, "time", "run", "--what-if", "host=2x")
    # The last digits of a sum differ between processors.
    whole = json.loads(printed[: printed.rindex("}") + 1], parse_float=lambda text: round(float(text), 9))
    assert {name: sorted(part) for name, part in whole.items()} | {"what_ifs": whole["what_ifs"]} == snapshot(name=JSON)
