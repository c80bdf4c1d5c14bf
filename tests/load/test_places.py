"""A full disk, read-only directories, and a clock that jumps: one line says what happened."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fakedist.rundir.directory import load_manifest
from tests.load.loading import FAKEDIST, TRAIN, Ended, figures_of, full, mounted, needs_time, profile, ran, read_only
from tests.unit.results.test_job_time import stage

pytestmark = [needs_time, pytest.mark.timeout(3600)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a script, a run, a configuration of check, a sweep, and an empty directory."""
    (tmp_path / "train.py").write_text(TRAIN)
    stage(tmp_path / "made", 0)
    (tmp_path / "fakedist.toml").write_text(
        '[check]\n[[check.jobs]]\nname = "job"\nscript = "train.py"\narguments = "2 1 0"\nworld_size = 8\n'
        'device = "virtual"\ngpu = "h100-80g"\nbudgets = { peak_allocated = "1 GiB" }\n'
    )
    (tmp_path / "empty").mkdir()
    return tmp_path


SWEEP = [*FAKEDIST, "sweep", "--world-size", "8", "--gpu", "h100-80g", "--axis", "n=1,2", "-o", "empty/sweep"]
SWEEP += ["train.py", "2", "{n}", "0"]
EXPORT = [*FAKEDIST, "export", "made", "--format", "chakra", "-o"]
HTML = [*FAKEDIST, "report", "made", "--format", "html", "-o"]


@pytest.mark.parametrize("kilobytes", [8, 64, 400])
def test_a_run_on_a_full_disk(place: Path, kilobytes: int) -> None:
    again = f"{' '.join(FAKEDIST)} report empty/run; echo report: $?; ls -A empty/run"
    command = [*profile("-o", "empty/run", steps=4, allocations=100_000)]
    both = ["sh", "-c", f'"$@"; code=$?; ({again}) >&2; exit $code', "sh", *command]
    ended = ran(mounted([full(place / "empty", kilobytes)], both), place)
    assert ended.code == 1
    assert "Traceback" not in ended.err, ended.err
    assert "disk is full" in ended.err or "No space left" in ended.err, ended.err
    assert "report: 0" in ended.err or "report: 1" in ended.err, ended.err
    assert not list((place / "empty").iterdir())


@pytest.mark.parametrize("command", [SWEEP, [*EXPORT, "empty/et"], [*HTML, "empty/x.html"]], ids=lambda each: each[3])
def test_a_result_on_a_full_disk(place: Path, command: list[str]) -> None:
    line = ran(mounted([full(place / "empty", 4)], command), place).tells_one_error()
    assert "full" in line or "No space" in line


@pytest.mark.parametrize("variable", ["TMPDIR", "FAKEDIST_CACHE"])
@pytest.mark.parametrize("what", ["full", "read-only"])
def test_temporary_files_and_the_cache_without_room(place: Path, variable: str, what: str) -> None:
    """Python takes another directory for temporary files, such as /tmp; a cache that the user chose is the only one."""
    folder = place / "empty"
    filled = [full(folder, 4), f"chmod 700 {folder}", f"(head -c 8192 /dev/zero > {folder}/zeros || true)"]
    mounts = filled if what == "full" else [read_only(folder)]
    ended = ran(mounted(mounts, profile("-o", "run", ranks="0,31")), place, {variable: str(folder)})
    if variable == "TMPDIR":
        assert ended.code == 0, ended.err
        assert figures_of(place / "run/rank31", place)
    else:
        ended.tells_one_error()
        assert not (place / "run").exists()


def test_a_home_that_cannot_be_written(place: Path) -> None:
    """The cache goes into the directory for temporary files."""
    (place / "tmp").mkdir()
    environment = {"HOME": str(place / "empty"), "TMPDIR": str(place / "tmp")}
    environment |= {"FAKEDIST_CACHE": "", "XDG_CACHE_HOME": ""}
    ended = ran(mounted([read_only(place / "empty")], profile("-o", "run")), place, environment)
    assert ended.code == 0, ended.err
    assert (place / f"tmp/fakedist-{os.geteuid()}").stat().st_mode & 0o777 == 0o700
    assert figures_of(place / "run", place)


def test_a_working_directory_and_an_output_that_cannot_be_written(place: Path) -> None:
    def refused(*command: str) -> str:
        return ran(mounted([read_only(place), f"cd {place}"], command), place).tells_one_error()

    assert ".fakedist cannot be written" in refused(*profile())
    assert "made" in refused(*profile("-o", "made", "--force"))
    for command in (SWEEP, [*EXPORT, "et"], [*HTML, "x.html"], [*FAKEDIST, "check", "--runs", "runs"]):
        assert "cannot be written" in refused(*command)
    shown = ran(mounted([read_only(place)], [*FAKEDIST, "report", "made"]), place)
    assert (shown.code, "peak" in shown.out) == (0, True), shown.err


@pytest.fixture
def jumping(tmp_path: Path) -> dict[str, str]:
    """The environment with a clock that jumps by years."""
    if shutil.which("gcc") is None:
        pytest.skip("it needs gcc")
    library = tmp_path / "jumping_clock.so"
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return {"LD_PRELOAD": str(library)}


def test_a_clock_that_jumps_changes_no_figure(place: Path, jumping: dict[str, str]) -> None:
    def run(name: str, environment: dict[str, str]) -> Ended:
        return ran(profile("-o", name, "--timeout", "600", steps=4, pause=0.2), place, environment)

    for name, environment in (("steady", {}), ("jumps", jumping)):
        ended = run(name, environment)
        assert ended.code == 0, ended.err
    steady, jumps = (load_manifest(place / name).summary for name in ("steady", "jumps"))
    assert steady is not None
    assert jumps is not None
    assert jumps.peak_allocated_bytes == steady.peak_allocated_bytes
    assert jumps.timed == steady.timed
    assert [step.peak_allocated_bytes for step in jumps.steps] == [step.peak_allocated_bytes for step in steady.steps]
    for step in jumps.steps:  # a year has 3e13 µs
        assert 0 <= step.wall_us < 600e6
    ended = ran([*FAKEDIST, "profile", "-o", "many", *profile(ranks="0,1,31")[4:]], place, jumping)
    assert ended.code == 0, ended.err
    assert ran([*FAKEDIST, "check"], place, jumping).code == 0
