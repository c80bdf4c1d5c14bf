from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.sweep.sweep_directory import JOURNAL_NAME, About, SweepJournal, write_about
from tests.conftest import ROOT
from tests.unit.sweep.rows_by_hand import row

EXAMPLES = ROOT / "examples" / "sweeps"
COMMAND = ["sweep", "--dry-run", "--world-size", "8", "--axis", "tp=1,2", "--axis", "fabric=p5-efa,dgx-h100-ndr"]


def test_a_dry_run_prints_the_points_and_their_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "--fabric", "{fabric}", "train.py", "--tp={tp}"]) == 0
    text = capsys.readouterr().out
    assert "4 points of 4, 2 runs" in text
    assert "3  tp=2 fabric=p5-efa" in text
    assert "fakedist profile --world-size=8 --rank=0 --device=virtual --steps=auto train.py --tp=2" in text
    assert "priced for fabric=p5-efa" in text
    assert list(tmp_path.iterdir()) == []


def test_a_command_without_a_world_size_takes_the_environments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert main(["sweep", "--dry-run", "--axis", "tp=1,2", "--standalone", "train.py", "--tp={tp}"]) == 0
    printed = capsys.readouterr()
    assert "--world-size=16" in printed.out
    assert printed.err == "fakedist: ignored, because only torchrun needs it: --standalone\n"


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_ready_spaces_can_be_swept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["num_points"] <= 500
    assert f"{file.name}`" in (ROOT / "docs" / "sweeps.md").read_text()
    text = file.read_text()
    if "megatron_gpt.py" in text and "--preset" not in text:
        required = re.search(r"_REQUIRED = \((.*)\)", (ROOT / "examples" / "megatron_config.py").read_text())
        assert required is not None
        flags = [f"--{name.replace('_', '-')}=" for name in re.findall(r'"(\w+)"', required[1])]
        assert [flag for flag in flags if flag not in text] == []


@pytest.mark.parametrize("more", [[], ["--axis", "tp=1,2,4", "-o", "elsewhere"]])
def test_options_may_follow_a_sweep_file(
    more: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text('script = "train.py"\narguments = "{tp}"\nworld_size = 8\naxes.tp = [1, 2]\n')
    assert main(["sweep", "--steps", "2", "sweep.toml", "--dry-run", *more]) == 0
    text = capsys.readouterr().out
    assert ("3 points of 3" if more else "2 points of 2") in text
    assert f"into {'elsewhere' if more else '.fakedist/sweep-sweep'};" in text


def test_results_are_printed_where_nothing_can_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    about = About(command=[], program="train.py", axes={"tp": [1]}, ranks="0", headroom=0.05, points=None)
    write_about(tmp_path, about)
    journal = SweepJournal(tmp_path / JOURNAL_NAME)
    journal.add_row(row(1000.0, tp=1))
    journal.close()
    (tmp_path / "report.html").mkdir()  # a file cannot take its place
    assert main(["sweep", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "1 point: 1 fits" in printed.out
    assert f"the table and the page in {tmp_path} stay as they are: Is a directory" in printed.err


@pytest.mark.parametrize(
    ("script", "told"), [("nope.py", "no such script: nope.py"), (__file__, "error: how many ranks does the job have?")]
)
def test_a_script_that_does_not_exist_is_the_first_error(
    script: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["sweep", script]) == 2
    assert told in capsys.readouterr().err


def test_options_after_a_script_are_its_own_and_json_has_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "train.py", "{tp}{fabric}", "--json", "-o", "x", "conf.toml"]) == 0
    assert "-o x conf.toml" in capsys.readouterr().out
    assert main([*COMMAND, "--json", "--fabric", "{fabric}", "-m", "pkg.train", "{tp}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_points"], found["num_runs"], found["ranks"]) == (4, 2, "ends")
    assert found["points"][3]["values"] == {"tp": 2, "fabric": "dgx-h100-ndr"}
    assert found["points"][3]["pricing"] == {"fabric": "dgx-h100-ndr"}
    assert "-m pkg.train 2" in found["points"][3]["command"]


@pytest.mark.parametrize(
    ("more", "told", "hint"),
    [
        (["train.py", "{tp}"], "axis fabric is used nowhere", "write {fabric} where its value belongs"),
        (["train.py", "{tp}", "{fabrik}"], "unknown placeholder {fabrik}", "did you mean 'fabric'?"),
        (["--where", "tp > 2", "train.py", "{tp}{fabric}"], "no point of 4 meets", "change or leave out a condition"),
        (["--where", "tp.real", "train.py", "{tp}{fabric}"], "Attribute is not available", "tp * pp * cp"),
        (["--axis", "tp", "train.py"], "--axis 'tp' has no values", "--axis tp=1,2,4,8"),
        (["--keep", "5", "train.py", "{tp}{fabric}"], "keep is all or none", "keep = "),
        (["--sampler", "tpe", "train.py", "{tp}{fabric}"], "--trials N draws points from a seed", "--help"),
        (["--monotone", "tp", "train.py", "{tp}{fabric}"], "--monotone was removed: every point runs", "--help"),
        (["--rank", "first", "train.py", "{tp}{fabric}"], "ranks is ends, stages or a list", "ends"),
        (["sweep.toml"], "sweep.toml cannot be read", "fakedist sweep sweep.toml"),
        (["sweep.toml", "--tp", "4"], "No such option '--tp'", "--help"),
        (["sweep.toml", "train.py"], "a sweep file takes no arguments: train.py", "--help"),
        (["."], ". is not the directory of a sweep", "fakedist sweep -o DIR"),
        ([], "no sweep file and no script", "--help"),
    ],
)
def test_a_mistake_is_told_with_what_to_type(
    more: list[str], told: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *more]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert hint in error.splitlines()[1]
    assert len(error.splitlines()) == 2


def test_a_foreign_sweep_files_values_reach_no_terminal_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(
        'script = "t.py"\narguments = ["{h}"]\nworld_size = 8\n[axes]\n'
        'h = ["x; rm -rf ~ \\u001b[1A\\u001b[2K\\r  1  h=256  t.py 256"]\n'
        '[files.config]\nname = "c.toml"\ntext = "a = 1\\n\\u001b[2Kb = {h}"\n'
    )
    main(["sweep", "sweep.toml", "--dry-run"])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\r" not in captured.out + captured.err


@pytest.mark.parametrize("line", ['axes.tp = ["1\\u0000"]', 'arguments = ["a\\u0000"]\naxes.tp = [1]'])
def test_a_nul_in_a_value_is_refused(line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text(f'script = "t.py"\nworld_size = 8\n{line}\n')
    assert main(["sweep", str(tmp_path / "sweep.toml"), "--dry-run"]) == 2
    assert "NUL character" in capsys.readouterr().err
