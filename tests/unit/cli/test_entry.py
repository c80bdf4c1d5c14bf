"""The output of commands where the terminal's encoding lacks a character."""

from __future__ import annotations

import io
import sys

import pytest

from fakedist.cli.entry import plain_where_needed


def printed(text: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    with plain_where_needed():
        print(text, end="")
    assert stream.errors == "strict"
    stream.flush()
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("encoding", "text", "expected"),
    [
        ("utf-8", "2.4 µs", "2.4 µs".encode()),
        ("latin-1", "2.4 µs", b"2.4 \xb5s"),
        ("ascii", "2.4 µs", b"2.4 us"),
        ("ascii", "kernel…", b"kernel..."),
        ("ascii", "Straße", b"Stra?e"),
        ("ascii", "a\udcffb", b"a\xffb"),  # a file name that is not text stays the same bytes
    ],
)
def test_a_character_that_the_terminal_lacks_is_plain(
    encoding: str, text: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(text, encoding, monkeypatch) == expected
