"""Shared libraries, read and written without a compiler and its tools. Those of 64-bit, little-endian hosts."""

from __future__ import annotations

import mmap
import struct
from itertools import accumulate
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ENTRY = struct.Struct("<QQ")
#: sh_type of the table of dynamic symbols, and st_info of what can be called: global or weak, a function.
_DYNSYM = 11
_FUNCTIONS = (0x12, 0x22)
#: p_type and p_flags: loaded and writable (the loader writes into it), the dynamic section, a stack without code.
_SEGMENTS = ((1, 6), (2, 6), (0x6474E551, 6))
_NULL, _NEEDED, _HASH, _STRTAB, _SYMTAB, _STRSZ, _SYMENT, _SONAME = 0, 1, 4, 5, 6, 10, 11, 14
_PAGE = 1 << 16


def exported_names(library: Path) -> list[str]:
    """Functions that a shared library exports, as ``nm --dynamic --defined-only`` lists them."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _HEADER.unpack_from(data)
        size, number = header[11:13]
        sections = [_SECTION.unpack_from(data, header[6] + index * size) for index in range(number)]
        names = set()
        for section in sections:
            if section[1] == _DYNSYM:
                strings = sections[section[6]][4]
                for name, kind, _, index, *_ in _SYMBOL.iter_unpack(data[section[4] : section[4] + section[5]]):
                    if index and kind in _FUNCTIONS:
                        start = strings + name
                        names.add(data[start : data.find(b"\0", start)].decode())
        return sorted(names)


def write_empty_library(path: Path, name: str, needed: list[str], like: Path) -> None:
    """Write a library without functions that depends on those ``needed``, for the processor of the library ``like``."""
    texts = ["", name, *needed]
    starts = list(accumulate((len(text.encode()) + 1 for text in texts), initial=0))
    strings = "".join(f"{text}\0" for text in texts).encode()
    begin = _HEADER.size + len(_SEGMENTS) * _SEGMENT.size
    symbols = begin + (len(needed) + 7) * _ENTRY.size
    hashes = symbols + _SYMBOL.size
    text_begin = hashes + 16
    entries = [*((_NEEDED, start) for start in starts[2:-1]), (_SONAME, starts[1]), (_HASH, hashes)]
    entries += [(_STRTAB, text_begin), (_SYMTAB, symbols), (_STRSZ, len(strings)), (_SYMENT, _SYMBOL.size), (_NULL, 0)]
    end = text_begin + len(strings)
    extents = ((0, end), (begin, symbols - begin), (0, 0))
    segments = [
        _SEGMENT.pack(kind, flags, start, start, start, size, size, _PAGE if kind == 1 else 8)
        for (kind, flags), (start, size) in zip(_SEGMENTS, extents, strict=True)
    ]
    with like.open("rb") as file:
        header = list(_HEADER.unpack(file.read(_HEADER.size)))
    header[4:] = [0, _HEADER.size, 0, header[7], _HEADER.size, _SEGMENT.size, len(_SEGMENTS), 0, 0, 0]
    dynamic = b"".join(_ENTRY.pack(*entry) for entry in entries)
    hash_table = struct.pack("<4I", 1, 1, 0, 0)  # one bucket, one symbol: the empty one
    path.write_bytes(_HEADER.pack(*header) + b"".join(segments) + dynamic + bytes(_SYMBOL.size) + hash_table + strings)
