"""The lines on stderr before the exit code of a run that failed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.cli.output import say_ending, say_first_failure
from fakedist.cli.profile import profile
from fakedist.launcher.ranks import RankRun
from fakedist.options import Job
from fakedist.rundir.directory import TAPE_NAME, JournalWriter
from fakedist.rundir.encoding import Record
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tape import Awaited, Guess, Lost

JOB = Job(world_size=64, rank=31, target="train.py", arguments=("--name", "a b"), seed=7)
FAILED = Ending(Outcome.EXCEPTION, 1, "FileNotFoundError: model.pt")
LAST = "fakedist: exit 1: the script raised FileNotFoundError: model.pt"
CALL = Awaited("broadcast_object_list", 4, (("range", 0, 64, 1), 0), -1, None, 1)


def guessed(called: str = "broadcast_object_list", line: int = 12, is_object: bool = True) -> Guess:
    return Guess(CALL, called, f"train.py:{line} (main)", "this rank's own ''", is_object)


def said(directory: Path, capsys: pytest.CaptureFixture[str], *records: Record, **how: Any) -> list[str]:
    """The lines on stderr of a run with this tape."""
    (directory / TAPE_NAME).unlink(missing_ok=True)
    writer = JournalWriter(directory / TAPE_NAME)
    for record in records:
        writer.append(record)
    ending, job = how.get("ending", FAILED), how.get("job", JOB)
    assert say_ending(ending, job, directory) == ending.code
    return capsys.readouterr().err.splitlines()


def commands(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line.partition(": fakedist ")[2]) for line in lines if ": fakedist profile" in line]


def test_the_guess_and_the_commands_stand_before_the_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(tmp_path, capsys, guessed())
    assert lines[0] == "fakedist: rank 31 continued with a guess in a call, which may be why it failed:"
    assert lines[1].startswith("  broadcast_object_list from rank 4 at train.py:12 (main): this rank's own '' was used")
    assert lines[-1] == LAST
    options = ["--device=virtual", "--seed=7", "--steps=auto", "train.py", "--name", "a b"]
    assert commands(lines) == [
        ["profile", "--world-size=64", "--rank=4,31", *options],
        ["profile", "--world-size=64", "--rank=31", "--with-peers", *options],
    ]


def test_objects_are_named_before_numbers_and_no_more_than_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [guessed("broadcast", line, is_object=False) for line in range(8)]
    lines = said(tmp_path, capsys, *numbers, guessed())
    assert lines[0].endswith("a guess in 9 calls, which may be why it failed:")
    assert [line.split()[0] for line in lines[1:5]] == ["broadcast_object_list", "broadcast", "broadcast", "..."]


def test_what_the_rank_did_not_find_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = Lost("/ckpt, which this rank looked for, is missing", True)
    lines = said(tmp_path, capsys, lost)
    assert lines[0] == "fakedist: /ckpt, which this rank looked for, is missing"
    assert [command[2] for command in commands(lines)] == ["--rank=0,31"]
    lost = Lost("/ckpt, which this rank looked for, is missing: rank 0 renamed it", False)
    assert commands(said(tmp_path, capsys, lost)) == []


def test_with_peers_the_hint_is_not_to_run_with_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(tmp_path, capsys, guessed(), job=replace(JOB, with_peers=True))
    assert [command[2] for command in commands(lines)] == ["--rank=4,31"]
    assert "--with-peers" not in " ".join(lines)
    lines = said(tmp_path, capsys, guessed(), CALL)  # the error has said what to type
    assert lines[0].startswith("fakedist: rank 31 continued with a guess")
    assert commands(lines) == []


@pytest.mark.parametrize(
    "ending", [Ending(Outcome.STOPPED, 0), Ending(Outcome.OUT_OF_MEMORY, 4), Ending(Outcome.INTERRUPTED, 130, "Ctrl-C")]
)
def test_a_run_that_did_not_fail_for_itself_names_no_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: Ending
) -> None:
    assert "guess" not in " ".join(said(tmp_path, capsys, guessed(), ending=ending))


def test_the_first_of_several_ranks_that_failed_names_its_guess(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    JournalWriter(tmp_path / TAPE_NAME).append(guessed())
    runs = [RankRun(0, None, Ending(Outcome.FINISHED, 0), 1.0), RankRun(5, tmp_path, FAILED, 1.0)]
    assert say_first_failure(runs, JOB) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("fakedist: rank 5 continued with a guess")
    assert commands(lines)[0][2] == "--rank=4,5"
    assert lines[-1] == f"fakedist: exit 1: rank 5: the script raised {FAILED.message}"


def test_a_script_inside_a_package_is_told_how_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    for folder in ("pkg", "pkg/sub"):
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    job = Job(world_size=8, rank=0, target="pkg/sub/train.py", arguments=("--lr", "1"))
    ending = Ending(Outcome.EXCEPTION, 1, "ImportError: attempted relative import with no known parent package")
    say_ending(ending, job, tmp_path)
    assert " -m pkg.sub.train --lr 1\n" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "pkg")
    say_ending(ending, replace(job, target="sub/train.py"), tmp_path)
    assert f"cd {tmp_path} && fakedist profile" in capsys.readouterr().err


def test_an_option_moved_before_the_script_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(world_size=8, rank=0, target="train.py", arguments=("--gpu-memory", "3GiB", "--steps", "1", "--lr", "2"))
    say_ending(Ending(Outcome.EXIT, 2, ""), replace(job, steps="auto"), tmp_path)
    command = shlex.split(capsys.readouterr().err.splitlines()[0].partition("as fakedist's: ")[2])
    assert [word for word in command if word.startswith("--steps")] == ["--steps"]
    assert command[command.index("train.py") :] == ["train.py", "--lr", "2"]


@pytest.mark.parametrize(
    ("arguments", "message", "moved"),
    [
        ("--steps 4 --force", "unrecognized arguments: --force", "--force"),
        ("--steps 4 -j 2 --no_kernels", "unrecognized arguments: -j 2 --no_kernels", "-j 2 --no_kernels"),
        ("--output=x --lr 2 --seed 3", "unrecognized arguments: --output=x --seed 3", "--output=x --seed 3"),
        ("--steps 4 --section time", "", "--steps 4 --section time"),
        ("--steps x --full", "argument --steps: invalid int value: 'x'", ""),
        ("--stps 4 --full", "unrecognized arguments: --stps 4", ""),
    ],
)
def test_every_option_of_the_command_that_a_script_does_not_know_moves_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str, moved: str
) -> None:
    typed = ["--world-size", "8", "-o", "run", "--steps", "2"]
    words = arguments.split()
    with profile.make_context("fakedist profile", [*typed, "train.py", *words]):
        say_ending(Ending(Outcome.EXIT, 2, message), replace(JOB, arguments=tuple(words)), tmp_path)
    first = capsys.readouterr().err.splitlines()[0]
    if not moved:
        assert first == "fakedist: exit 2: the script's own exit code"
        return
    before = "--world-size 8"
    before += " -o run" if "--output" not in moved else ""
    before += " --steps 2" if "--steps" not in moved else ""
    rest = [word for word in words if word not in moved.split()]
    assert first.partition("as fakedist's: ")[2] == " ".join(["fakedist profile", before, moved, "train.py", *rest])
