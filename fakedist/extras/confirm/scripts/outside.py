"""Measures the memory outside the caching allocator, after the first use of each thing that a job may use.

Bytes in use on the device, by ``cudaMemGetInfo``, and bytes that the allocator reserved: the difference is the CUDA
context, loaded kernels, the handles of libraries and NCCL's buffers. No other process may use the GPU meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist

from fakedist.extras.confirm.jobs.training import Transformer, language_loss
from fakedist.extras.confirm.scripts.start import Measuring


def measure(measuring: Measuring) -> None:
    """Use the libraries, one after another."""
    rows: list[dict[str, Any]] = []
    for name, use in {**LIBRARIES, **(COMMUNICATORS if measuring.gpu is None else {})}.items():
        rows.append(_after(name.partition(" (")[0], use))
        measuring.write(rows)


def _after(name: str, use: Callable[[], object]) -> dict[str, Any]:
    error = ""
    try:
        use()
        torch.cuda.synchronize()
    except Exception as failed:  # a library that is not there must not hide what the others take
        error = f"{type(failed).__name__}: {str(failed).strip().splitlines()[0] if str(failed).strip() else ''}"
    free, total = torch.cuda.mem_get_info()
    used = {"used_bytes": total - free, "reserved_bytes": torch.cuda.memory_reserved()}
    return {"after": name, **used, "error": error}


def _product(multiply: Callable[[torch.Tensor], object]) -> None:
    multiply(torch.ones(512, 512, device="cuda", dtype=torch.bfloat16))


def _training() -> None:
    model = Transformer(num_layers=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = language_loss(model(tokens), tokens)
    loss.backward()
    optimizer.step()


def _cudnn() -> None:
    layer = torch.nn.Conv2d(16, 32, 3).cuda()
    layer(torch.ones(4, 16, 64, 64, device="cuda")).sum().backward()


def _first_communicator() -> None:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # of a world of one rank: nothing to meet
    store = f"tcp://127.0.0.1:{20_000 + os.getpid() % 20_000}"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))


def _another_communicator() -> None:
    dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=cast(dist.ProcessGroup, dist.new_group([0])))


#: What is used for the first time, in this order.
LIBRARIES: dict[str, Callable[[], object]] = {
    "CUDA context": lambda: (torch.cuda.init(), torch.cuda.current_stream()),
    "a first kernel": lambda: torch.zeros(1024, device="cuda").add_(1),
    "cuBLAS: a product": lambda: _product(lambda a: a @ a),
    "cuBLASLt: a product with an epilogue": lambda: _product(
        lambda a: torch._addmm_activation(a[0], a, a, use_gelu=True)
    ),
    "a training step of a transformer: its kernels": _training,
    "cuDNN: a convolution, forward and backward": _cudnn,
    "cuSOLVER: QR": lambda: torch.linalg.qr(torch.ones(64, 64, device="cuda")),
    "cuFFT": lambda: torch.fft.fft(torch.ones(4096, device="cuda")),
}
#: Groups of one rank; the virtual GPU refuses NCCL, which fakedist never calls.
COMMUNICATORS: dict[str, Callable[[], object]] = {
    "NCCL: a communicator of one rank": _first_communicator,
    "NCCL: one more": _another_communicator,
    "NCCL: one more (again)": _another_communicator,
}
