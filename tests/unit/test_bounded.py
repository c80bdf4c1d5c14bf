import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fakedist.bounded import UnreadableError, open_file, read_bytes, read_json, read_toml


def test_a_pipe_a_device_and_a_directory_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a directory")):
        with pytest.raises(UnreadableError, match=f"^it is {what}, not a file$"):
            open_file(path)


def test_a_link_to_a_file_is_read_and_no_more_than_the_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link", 7) == b"content"
    os.truncate(tmp_path / "file", 1 << 40)
    with pytest.raises(UnreadableError, match="it has more than 1,000 bytes"):
        read_bytes(tmp_path / "file", 1000)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        *((read_json, content) for content in ("", "[" * 200_000, "9" * 5000, "\udcff", "{")),
        *((read_toml, f"a = {value}") for value in ("[" * 200_000, "9" * 5000, "\udcff", "", "1\na = 2")),
    ],
)
def test_what_is_no_json_or_toml_is_told_in_one_line(
    read: Callable[[Path], object], content: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UnreadableError) as caught:
        read(tmp_path / "x")
    assert "\n" not in str(caught.value)
