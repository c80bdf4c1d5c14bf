"""Words are read up to where nothing can be read, and no further."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import pytest

from fakedist import frames
from fakedist.errors import RecordingError
from fakedist.gpu.values import tensors
from fakedist.own_memory import read_words
from fakedist.record.copies import variable_name

_PAGE = mmap.PAGESIZE


def test_words_before_unmapped_memory_are_read_and_no_others() -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    wanted = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = libc.mmap(None, ctypes.c_size_t(2 * _PAGE), *wanted)
    assert libc.munmap(ctypes.c_void_p(start + _PAGE), ctypes.c_size_t(_PAGE)) == 0
    ctypes.c_uint64.from_address(start + _PAGE - 8).value = 7
    assert read_words(start + _PAGE - 24, 24) == (0, 0, 7)
    assert read_words(0, 4) == ()
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(_PAGE))


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it to have nothing readable beyond so many words from any address on."""
    read = os.pread

    def only(num_words: int) -> None:
        monkeypatch.setattr(os, "pread", lambda file, size, address: read(file, size, address)[: 8 * num_words])

    return only


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals is used there")
def test_a_frame_is_read_only_as_far_as_it_goes(cut: Callable[[int], None]) -> None:
    """A frame may be the last one before unmapped memory."""
    named = [1]
    assert variable_name(named) == "named"
    frames._first_local.cache_clear()
    cut(4)
    assert variable_name(named) == ""
    frames._first_local.cache_clear()


def test_a_storage_is_read_only_as_far_as_it_goes(cut: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in (tensors._offsets, tensors._weak_count):
        expected = layout()
        layout.cache_clear()
        cut(1)
        with pytest.raises(RecordingError):
            layout()
        monkeypatch.undo()
        layout.cache_clear()
        assert layout() == expected
