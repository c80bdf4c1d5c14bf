import os
from pathlib import Path

import pytest

from fakedist.bounded import UnreadableError, open_file, read_bytes, read_json, read_toml


def test_a_pipe_a_device_and_a_directory_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a directory")):
        with pytest.raises(UnreadableError, match=f"^it is {what}, not a file$"):
            open_file(path)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", 7) == b"content"


def test_no_more_is_read_than_the_bound(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableError, match="it has more than 1,000 bytes"):
        read_bytes(tmp_path / "sparse", 1000)


@pytest.mark.parametrize("content", ["", "[" * 200_000, "9" * 5000, "\udcff", "{"])
def test_what_is_no_json_is_told_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UnreadableError) as caught:
        read_json(tmp_path / "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", ["a = " + "[" * 200_000, "a = " + "9" * 5000, "a = \udcff", "a =", "a.a = 1\na = 2"]
)
def test_what_is_no_toml_is_told_in_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UnreadableError) as caught:
        read_toml(tmp_path / "x")
    assert "\n" not in str(caught.value)
