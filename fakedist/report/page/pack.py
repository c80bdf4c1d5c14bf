"""Packs numbers for the page's drawings as small as possible: one compressed block of bytes, as text.

The block is a little-endian u32 with the length of a JSON header, the header padded with blanks to a multiple of 8,
and the arrays, each on a multiple of 8. Integers are stored byte by byte (all lowest bytes, then all second ones), so
that neighbours are similar and gzip compresses them well.
"""

from __future__ import annotations

import base64
import gzip
import json

import numpy as np
import numpy.typing as npt

from fakedist.analysis.recording import Array

_LEVEL = 6  # gzip; 9 takes three times as long for 2 % less


class Pack:
    """Named arrays and one JSON object.

    Attributes:
        meta: Everything that is not an array. The page reads it from the header.
    """

    def __init__(self) -> None:
        self.meta: dict[str, object] = {}
        self._arrays: dict[str, Array] = {}

    def add(self, name: str, values: npt.ArrayLike) -> None:
        """Add an array: non-negative integers in the narrowest type, everything else as float64."""
        array = np.asarray(values)
        if array.dtype.kind in "iub":
            most = int(array.max(initial=0))
            kinds: tuple[tuple[int, str], ...] = ((1 << 8, "u1"), (1 << 16, "<u2"), (1 << 32, "<u4"))
            kind = next((kind for limit, kind in kinds if most < limit), "<f8")
            array = array.astype(kind)
        else:
            array = array.astype("<f8")
        self._arrays[name] = array

    def text(self) -> str:
        """The whole block as base64 text."""
        index, body, at = {}, [], 0
        for name, array in self._arrays.items():
            index[name] = [array.dtype.str.lstrip("<|"), at, len(array)]
            data = array.tobytes()
            if array.dtype.kind == "u":
                data = np.frombuffer(data, "u1").reshape(-1, array.dtype.itemsize).T.tobytes()
            data += bytes(-len(data) % 8)
            body.append(data)
            at += len(data)
        header = json.dumps({"meta": self.meta, "arrays": index}, separators=(",", ":")).encode()
        header += b" " * (-(len(header) + 4) % 8)
        block = b"".join([len(header).to_bytes(4, "little"), header, *body])
        return base64.b64encode(gzip.compress(block, _LEVEL, mtime=0)).decode()
