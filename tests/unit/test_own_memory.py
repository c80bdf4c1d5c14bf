"""Words are read up to where nothing can be read, and no further."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from fakedist.errors import RecordingError
from fakedist.gpu.values import tensors
from fakedist.own_memory import read_words
from fakedist.record import copies

_PAGE = mmap.PAGESIZE


def test_words_before_unmapped_memory_are_read_and_no_others() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    wanted = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = libc.mmap(None, ctypes.c_size_t(2 * _PAGE), *wanted)
    assert libc.munmap(ctypes.c_void_p(start + _PAGE), ctypes.c_size_t(_PAGE)) == 0
    ctypes.c_uint64.from_address(start + _PAGE - 8).value = 7
    assert read_words(start + _PAGE - 24, 24) == (0, 0, 7)
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(_PAGE))


def test_nothing_is_read_at_no_address() -> None:
    assert read_words(0, 4) == ()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals is used there")
def test_a_frame_is_read_only_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame may be the last one before unmapped memory."""
    named = [1]
    monkeypatch.setattr(copies, "read_words", lambda address, count: read_words(address, count)[:4])
    assert copies.variable_name(named) == ""
    monkeypatch.undo()
    assert copies.variable_name(named) == "named"


def test_a_storage_is_read_only_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in (tensors._offsets, tensors._weak_count):
        expected = layout()
        layout.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(tensors, "read_words", lambda address, count: read_words(address, count)[:1])
            with pytest.raises(RecordingError):
                layout()
        layout.cache_clear()
        assert layout() == expected
