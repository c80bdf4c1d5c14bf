"""Measures the memory outside the caching allocator, after the first use of each thing that a job may use.

    python -m fakedist.extras.confirm.scripts.outside RESULT.json [--device virtual --gpu h200 --gpu-memory BYTES]

Bytes in use on the device, by ``cudaMemGetInfo``, and bytes that the allocator reserved: the difference is the CUDA
context, loaded kernels, the handles of libraries and NCCL's buffers. No other process may use the GPU meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fakedist.extras.confirm.allocator_history import replace_with
from fakedist.extras.confirm.scripts.device import device, parse


def main() -> None:
    """Use the libraries, one after another."""
    args = parse(__doc__, ("result", {"type": Path}))
    with device(args):
        rows: list[dict[str, Any]] = []
        for name, use in (*LIBRARIES, *(COMMUNICATORS if args.device == "present" else ())):
            rows.append(_after(name, use))
            replace_with(args.result, rows)
        time.sleep(0.3)  # an autograd thread that starts while the interpreter ends aborts the process


def _after(name: str, use: Callable[[], object]) -> dict[str, Any]:
    import torch

    error = ""
    try:
        use()
        torch.cuda.synchronize()
    except Exception as failed:  # a library that is not there must not hide what the others take
        error = f"{type(failed).__name__}: {str(failed).strip().splitlines()[0] if str(failed).strip() else ''}"
    free, total = torch.cuda.mem_get_info()
    used = {"used_bytes": total - free, "reserved_bytes": torch.cuda.memory_reserved()}
    return {"after": name, **used, "error": error}


def _context() -> None:
    import torch

    torch.cuda.init()
    torch.cuda.current_stream()


def _kernel() -> None:
    import torch

    torch.zeros(1024, device="cuda").add_(1)


def _cublas() -> None:
    import torch

    a = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    a @ a


def _cublaslt() -> None:
    import torch

    a = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    torch._addmm_activation(a[0], a, a, use_gelu=True)


def _training() -> None:
    import torch

    from fakedist.extras.confirm.jobs.models import Transformer, language_loss

    model = Transformer(num_layers=2).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = language_loss(model(tokens), tokens)
    loss.backward()
    optimizer.step()


def _cudnn() -> None:
    import torch

    layer = torch.nn.Conv2d(16, 32, 3).cuda()
    layer(torch.ones(4, 16, 64, 64, device="cuda")).sum().backward()


def _cusolver() -> None:
    import torch

    torch.linalg.qr(torch.ones(64, 64, device="cuda"))


def _cufft() -> None:
    import torch

    torch.fft.fft(torch.ones(4096, device="cuda"))


def _first_communicator() -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # of a world of one rank: nothing to meet
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{20_000 + os.getpid() % 20_000}", rank=0, world_size=1
    )
    dist.all_reduce(torch.ones(1 << 20, device="cuda"))


def _another_communicator() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1 << 20, device="cuda"), group=cast(dist.ProcessGroup, dist.new_group([0])))


#: What is used for the first time, in this order.
LIBRARIES: tuple[tuple[str, Callable[[], None]], ...] = (
    ("CUDA context", _context),
    ("a first kernel", _kernel),
    ("cuBLAS: a product", _cublas),
    ("cuBLASLt: a product with an epilogue", _cublaslt),
    ("a training step of a transformer: its kernels", _training),
    ("cuDNN: a convolution, forward and backward", _cudnn),
    ("cuSOLVER: QR", _cusolver),
    ("cuFFT", _cufft),
)
#: Groups of one rank; the virtual GPU refuses NCCL, which fakedist never calls.
COMMUNICATORS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("NCCL: a communicator of one rank", _first_communicator),
    ("NCCL: one more", _another_communicator),
    ("NCCL: one more", _another_communicator),
)

if __name__ == "__main__":
    main()
