"""Load a CUDA extension and call it on tensors and on memory of its own; prints what each call answered."""

from __future__ import annotations

import ctypes
import sys

import torch

HELD_BYTES = 64 << 20
WORKSPACE_BYTES = 48 << 20


def get_cublas_workspace() -> torch.Tensor:
    """The workspace of Transformer Engine's products, which are not operations of torch."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


library = ctypes.CDLL(sys.argv[1])
library.error_name.restype = ctypes.c_char_p
values = torch.ones(1 << 20, device="cuda", requires_grad=True)
stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
workspace = get_cublas_workspace()
free_before = torch.cuda.mem_get_info()[0]
answers = [
    library.scale_tensor(ctypes.c_void_p(values.data_ptr()), ctypes.c_long(values.numel()), stream),
    library.scale_own_memory(ctypes.c_size_t(HELD_BYTES)),
]
taken = free_before - torch.cuda.mem_get_info()[0]
values.square().sum().backward()
numbers = (ctypes.c_int * 8)()
print("TAKEN", library.error_name(library.taken(numbers)).decode(), *numbers, flush=True)
print("EXTENSION", *(library.error_name(answer).decode() for answer in answers), taken, flush=True)
