"""safetensors: large files are written here, in its format, because its own writer does not go through Python."""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from fakedist.world.files import LARGE_BYTES, SparseFile, saved

if TYPE_CHECKING:
    import numpy

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"} | {
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"
}  # fmt: skip


def sparse_safetensors(module: ModuleType) -> dict[str, object]:
    """For ``safetensors.torch``: write the zeros of large files as holes."""
    save_file, flatten = getattr(module, "save_file", None), getattr(module, "_flatten_as_ptr", None)
    if save_file is None or flatten is None:
        return {}

    def save(
        tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
    ) -> None:
        size = sum(each.numel() * each.element_size() for each in tensors.values())
        names = {name: _DTYPES.get(str(each.dtype).removeprefix("torch.")) for name, each in tensors.items()}
        if not saved.is_on or size < LARGE_BYTES or None in names.values():
            save_file(tensors, filename, metadata)
            return
        saved.announce(size)
        kept: list[tuple[numpy.ndarray, object]] = []
        flatten(tensors, kept)  # raises the errors of safetensors itself
        arrays = {name: array for name, (array, _) in zip(tensors, kept, strict=True)}
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        start = 0
        for name in order:
            end = start + arrays[name].nbytes
            header[name] = {"dtype": names[name], "shape": list(tensors[name].shape), "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        with open(filename, "wb") as opened:
            file = SparseFile(opened)
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write_from(arrays[name].ctypes.data, arrays[name].nbytes)
            file.end()

    return {"save_file": save}
