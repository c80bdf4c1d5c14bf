"""Text into a named file: whole or not at all, never in place of what is not a file, and looked at before the work."""

import os
from pathlib import Path

import pytest

from fakedist.errors import JobError
from fakedist.report.writing import replace_text, see_that_it_can_be_written


def test_nothing_is_left_next_to_the_file(tmp_path: Path) -> None:
    replace_text(tmp_path / "page.html", "half a pair \udc80")
    assert (tmp_path / "page.html").read_text() == "half a pair ?"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link").symlink_to("page.html")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_text() == "new"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_text(pipe, "told")
    assert os.read(reading, 100) == b"told"
    os.close(reading)
    assert pipe.is_fifo()


@pytest.mark.parametrize("place", ["file/page.html", "folder"])
def test_a_place_that_is_none_is_said_before_and_when_it_is_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for write in (see_that_it_can_be_written, lambda path: replace_text(path, "new")):
        with pytest.raises(JobError, match="cannot be written"):
            write(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_places_that_are_fine_are_not_complained_about(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    for place in ("new", "deep/er/new", "there"):
        see_that_it_can_be_written(tmp_path / place)
    for place in ("new", "deep/er/new", "."):
        see_that_it_can_be_written(tmp_path / place, is_directory=True)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with pytest.raises(JobError, match="is not a directory"):
        see_that_it_can_be_written(tmp_path / "there", is_directory=True)
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for place in ("a" * 300, "link"):  # no file has such a name
        with pytest.raises(JobError, match="cannot be written"):
            see_that_it_can_be_written(tmp_path / place)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_reported_first(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(JobError, match="Permission denied"):
        see_that_it_can_be_written(tmp_path / "deep/er")
    tmp_path.chmod(0o700)
