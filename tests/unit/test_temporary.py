"""Temporary directories: those of killed processes go, and no other directory does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fakedist.errors import SetupError
from fakedist.temporary import kept_directory, remove_left_over, replacing, scratch_directory

HOLDS = (
    "import os, sys\nfrom fakedist.temporary import scratch_directory\n"
    "with scratch_directory('check') as path:\n"
    "    (path / 'inside').mkdir()\n    (path / 'inside/file').write_text('x')\n"
    "    print(path, flush=True)\n    sys.stdin.read()\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start() -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a temporary directory until its stdin ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def boot_of(folder: Path) -> str:
    """The part of a temporary directory's name that names this kernel's boot."""
    with scratch_directory("check", folder) as path:
        return path.name.split("-")[2]


def end(process: subprocess.Popen[str], *, kill: bool = False) -> None:
    if kill:
        process.kill()
    process.communicate()


def test_a_directory_goes_with_its_context_and_with_the_start_after_a_kill(folder: Path) -> None:
    killed, left = start()
    living, used = start()
    assert left.parent == used.parent == folder
    end(killed, kill=True)
    assert (left / "inside/file").exists()
    with scratch_directory("sweep") as own:
        assert sorted(folder.iterdir()) == sorted([used, own])
        remove_left_over()  # nor does a process lose its own
        assert own.is_dir()
    end(living)
    assert list(folder.iterdir()) == []


def test_only_directories_of_this_kernel_that_nobody_holds_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = boot_of(folder)
    (elsewhere := folder / "target").mkdir()
    (elsewhere / "file").write_text("mine")
    names = ("fakedist-0", "fakedist-x8k2j4l1", "fakedist-check-8k2j4l1a", f"fakedist-check-{'0' * 16}-8k2j4l1a")
    kept = [elsewhere, *(folder / name for name in names)]
    for path in kept[1:]:
        path.mkdir()
    kept += [folder / f"fakedist-check-{boot}-{kind}" for kind in ("file", "link", "fifo")]
    kept[-3].write_text("mine")
    kept[-2].symlink_to(elsewhere)
    os.mkfifo(kept[-1])
    (gone := folder / f"fakedist-check-{boot}-8k2j4l1a").mkdir()
    remove_left_over()
    assert sorted(folder.iterdir()) == sorted(kept)
    assert (elsewhere / "file").read_text() == "mine"
    gone.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as if another user had left it
    remove_left_over()
    monkeypatch.undo()
    remove_left_over(folder.parent / "missing")
    folder.chmod(0o777)  # anyone may give a directory such a name
    remove_left_over(folder)
    assert gone.is_dir()
    folder.chmod(0o1777)
    remove_left_over(folder)
    assert not gone.exists()


def test_a_directory_that_was_removed_before_it_was_locked_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], tempfile.mkdtemp

    def removed(*args: object, **kwargs: object) -> str:
        made.append(real(prefix="fakedist-"))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", removed)
    with scratch_directory("check") as path:
        assert path.is_dir()
    assert len(made) == 2


def test_where_nothing_can_be_written_one_line_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with (
        pytest.raises(SetupError, match="temporary files cannot be written: No usable") as raised,
        scratch_directory("x"),
    ):
        pass
    assert "TMPDIR=" in raised.value.hint


def test_a_kept_directory_goes_when_it_is_old(folder: Path) -> None:
    (old := folder / "fakedist-view-old").mkdir()
    os.utime(old, (0, 0))
    kept = [kept_directory("view", 60), kept_directory("view", 60)]
    assert sorted(folder.iterdir()) == sorted(kept)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)  # no name is left for a suffix
    with replacing(path) as fresh:
        fresh.write_text("first")
    with pytest.raises(UnicodeEncodeError), replacing(path) as fresh:
        fresh.write_text("second" * 10_000 + "\udcff", encoding="utf-8")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
