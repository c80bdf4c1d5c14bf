"""A small scratch buffer for computations that the real job does not make.

Whatever a GPU's caching allocator hands out is recorded and counted. So wider types and masks go into a fixed buffer
that the allocator does not know.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import empty

from fakedist.errors import WorldError

BYTES = 1 << 20

_last_use: dict[torch.device, torch.cuda.Event] = {}


def pieces(tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Split a tensor into parts, each with one uninitialised scratch tensor of its shape for every type.

    On CUDA the parts are small enough for the buffer. On the CPU there is one part, with fresh memory.

    Args:
        tensor: Contiguous on CUDA, as NCCL requires.
        dtypes: Types of the scratch tensors for each part.

    Yields:
        A part, and its scratch tensors.

    Raises:
        WorldError: The CUDA runtime cannot allocate the buffer.
    """
    if not tensor.is_cuda or not tensor.is_contiguous():
        yield tensor, [torch.empty_like(tensor, dtype=dtype) for dtype in dtypes]
        return
    device, stream = tensor.device, torch.cuda.current_stream(tensor.device)
    address, captured = _buffer(device.index), torch.cuda.is_current_stream_capturing()
    if device in _last_use and not captured:
        stream.wait_event(_last_use[device])  # streams take turns
    for piece in tensor.view(-1).split(BYTES // sum(dtype.itemsize for dtype in dtypes) // 8 * 8):
        at, scratch = address, []
        for dtype in dtypes:
            bytes_ = piece.numel() * dtype.itemsize
            storage = torch._C._construct_storage_from_data_pointer(at, device, bytes_)
            scratch.append(empty(0, dtype=dtype, device=device).set_(storage))
            at += -(-bytes_ // 16) * 16
        yield piece, scratch
    if not captured:
        _last_use[device] = stream.record_event()


@functools.cache
def _buffer(device_index: int) -> int:
    """Address of the device's buffer; it lives as long as the process."""
    runtime = ctypes.CDLL(None)  # torch's own, or the virtual GPU's: both are loaded with global symbols
    address = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        error = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(BYTES))
    if error or not address.value:
        raise WorldError(f"cudaMalloc of {BYTES} bytes failed with error {error}", "the GPU has no memory left")
    return address.value
