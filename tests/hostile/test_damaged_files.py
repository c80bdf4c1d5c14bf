"""Whatever a file holds: one line that names it, nothing run, and no control character on the terminal."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.rundir.directory import load_manifest
from tests.hostile import runs, snapshots
from tests.unit.report.handmade import ended_well

CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ended_well(tmp_path_factory.mktemp("hostile") / "run")


def said_of(path: Path, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The one line that is said of a file that cannot be shown."""
    assert main([*command, str(path)]) == 1
    printed = capsys.readouterr()
    first, *more = printed.err.splitlines()
    assert first.startswith("fakedist: error: ")
    assert all(line.startswith("  ") for line in more)
    assert not CONTROLS.search(printed.out + printed.err)
    return first


@pytest.mark.parametrize("what", snapshots.REFUSED)
def test_what_is_no_snapshot_is_told_in_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content, said = snapshots.REFUSED[what]
    (tmp_path / "x.pickle").write_bytes(content)
    line = said_of(tmp_path / "x.pickle", capsys, "report")
    assert "x.pickle" in line
    assert said in line
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("form", ["text", "markdown", "csv", "html", "json"])
@pytest.mark.parametrize("what", snapshots.SHOWN)
def test_a_strange_snapshot_is_shown(what: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pickle").write_bytes(snapshots.SHOWN[what])
    table = ("--table", "stacks") if form == "csv" else ()
    assert main(["report", str(tmp_path / "x.pickle"), "--format", form, *table]) == 0
    out = capsys.readouterr().out
    assert out
    if form not in ("html", "json"):
        assert not CONTROLS.search(out)
        assert len(out) < 100_000


def test_a_pickle_cannot_take_the_memory_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(b"\x80\x04]r\xff\xff\xff\x7f.")  # an index of 2 ** 31 places
    found = subprocess.run([sys.executable, "-m", "fakedist", "report", path], capture_output=True, text=True)
    assert found.returncode == 1
    assert "it asks for more memory than a file of its size may need" in found.stderr


@pytest.mark.parametrize("what", runs.REFUSED)
def test_a_damaged_run_is_told_in_one_line(
    what: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(good, run)
    change, said = runs.REFUSED[what]
    change(run)
    # The page reads every table; the command line's tables are first rebuilt where the summary is missing.
    line = said_of(run, capsys, "report", "--format", "html", "-o", str(tmp_path / "x.html"))
    assert str(run) in line
    assert said in line
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "command",
    [["report"], ["report", "--format", "markdown"], ["report", "--section", "communication"], ["report", "--json"]],
)
def test_no_control_character_of_a_run_reaches_the_terminal(
    command: list[str], good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    runs.escapes(run)
    assert load_manifest(run).summary
    assert main([*command, str(run)]) == 0
    out = capsys.readouterr().out
    assert not CONTROLS.search(out)
    assert re.search(r"\\(x|u00)1b\\?\[31mred", out)  # Markdown has a backslash before a bracket


def test_nor_in_a_comparison(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    runs.escapes(run)
    assert main(["compare", "--all-rows", str(good), str(run)]) == 0
    out = capsys.readouterr().out
    assert not CONTROLS.search(out)
    assert "\\x1b[31mred" in out


def test_figures_that_contradict_each_other_are_told_in_one_line(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(good, run)
    runs.figures(rank=None, world_size=None)(run)
    line = said_of(run, capsys, "report")
    assert re.search(r"run cannot be shown: TypeError: .* in fakedist/\w+/.*\.py:\d+$", line)
    monkeypatch.setenv("FAKEDIST_TRACEBACK", "1")
    with pytest.raises(TypeError):
        main(["report", str(run)])
