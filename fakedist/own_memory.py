"""Reads this process's memory without the risk of ending it: where nothing is mapped, fewer bytes come back."""

from __future__ import annotations

import os
import struct

_WORD = 8


def read_words(address: int, count: int) -> tuple[int, ...]:
    """Up to ``count`` unsigned 8-byte words from an address on: those before the first that cannot be read.

    An object's layout is found by looking for a word that is known to be somewhere near. A read through ctypes beyond
    the object is a crash if the object is the last one before unmapped memory. The kernel's file fails instead.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a sandbox without /proc: nothing can be found there
        return ()
    try:
        data = os.pread(memory, count * _WORD, address)
    except OSError:
        return ()
    finally:
        os.close(memory)
    whole = len(data) // _WORD
    return struct.unpack(f"={whole}Q", data[: whole * _WORD])
