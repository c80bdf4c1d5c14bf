"""A little memory to compute in, where the real job would take none.

What a GPU's caching allocator gives out is recorded and counted, so wider types and masks are put into a fixed buffer
that it does not know.
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
    """A tensor part by part, each with one uninitialised tensor of its shape for every type.

    On CUDA the parts are small enough for the buffer; on the CPU there is one part and fresh memory.

    Args:
        tensor: Contiguous on CUDA, as NCCL requires.
        dtypes: Types of what is needed beside each part.

    Raises:
        WorldError: The CUDA runtime gives no memory.
    """
    if not tensor.is_cuda or not tensor.is_contiguous():
        yield tensor, [torch.empty_like(tensor, dtype=dtype) for dtype in dtypes]
        return
    device, stream = tensor.device, torch.cuda.current_stream(tensor.device)
    address, captured = _buffer(device.index), torch.cuda.is_current_stream_capturing()
    if device in _last_use and not captured:
        stream.wait_event(_last_use[device])  # streams take turns
    for piece in tensor.view(-1).split(BYTES // sum(dtype.itemsize for dtype in dtypes) // 8 * 8):
        at, beside = address, []
        for dtype in dtypes:
            bytes_ = piece.numel() * dtype.itemsize
            storage = torch._C._construct_storage_from_data_pointer(at, device, bytes_)
            beside.append(empty(0, dtype=dtype, device=device).set_(storage))
            at += -(-bytes_ // 16) * 16
        yield piece, beside
    if not captured:
        _last_use[device] = stream.record_event()


@functools.cache
def _buffer(device_index: int) -> int:
    """Address of the device's buffer; it lives as long as the process."""
    runtime = ctypes.CDLL(None)  # torch's own, or the virtual GPU's: both are loaded for all to see
    address = ctypes.c_void_p()
    with torch.cuda.device(device_index):
        error = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(BYTES))
    if error or not address.value:
        raise WorldError(f"cudaMalloc of {BYTES} bytes failed with error {error}", "the GPU has no memory left at all")
    return address.value
