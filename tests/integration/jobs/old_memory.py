"""Reads device memory that no computed value reached, past everything that computes values; prints what it got.

Takes the path of a library with ``read_in_thread(to, from, size)``, which copies in a thread of C.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from typing import Any

import torch
import triton
import triton.language as tl

graphs: list[str] = []


def reuse() -> None:
    """Leave values in blocks that are handed out again."""
    for number in range(200):
        torch.full((128,), 1.0 + number).mul(3.1e-41).cuda()
        torch.randint(1 << 40, 1 << 46, (64,)).cuda()


def constants(graph: torch.fx.Graph) -> None:
    """Keep the constants of a graph that Inductor compiles."""
    fills = [node for node in graph.nodes if node.target is torch.ops.aten.full.default]
    graphs.extend(f"{node.kwargs['dtype']} {node.args[1]}" for node in fills if node.args[0] in ([], [4, 4]))


def in_thread(work: Any) -> Any:
    """Run something in a thread of its own, whose operations are not followed."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def raw(tensor: torch.Tensor) -> list[float]:
    """Copy a tensor in a thread of C, while this one keeps the GIL."""
    values = torch.full(tensor.shape, 9, dtype=tensor.dtype)
    library.read_in_thread(*(ctypes.c_void_p(each.data_ptr()) for each in (values, tensor)), tensor.nbytes)
    listed: list[float] = values.tolist()
    return listed


@torch.compile
def loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(x.float(), targets)


@torch.compile
def folded(x: torch.Tensor) -> torch.Tensor:
    return x * ((torch.full((4, 4), 2.5, device="cuda") * 3).to(torch.bfloat16) + 1)


@torch.compile
def counted(ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    count.add_(1)
    return (ids * 2).sum()


@triton.jit
def increment(to, source, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel of the script's own."""
    offsets = tl.arange(0, block)
    mask = offsets < size
    tl.store(to + offsets, tl.load(source + offsets, mask=mask) + 1, mask=mask)


library = ctypes.PyDLL(sys.argv[1])
torch._inductor.config.post_grad_custom_post_pass = constants
said: dict[str, Any] = {}
reuse()
logits = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
loss(logits, torch.zeros(256, dtype=torch.int64, device="cuda")).backward()
folded(torch.ones(4, 4, device="cuda"))
said["constants"] = sorted(set(graphs))

reuse()
said["a thread's fill"] = in_thread(lambda: torch.full([3], 7, device="cuda").tolist())
said["a thread's copy"] = in_thread(lambda: torch.tensor([1.5, 2.5]).cuda().clone().tolist())
said["a thread's sum"] = in_thread(lambda: (torch.tensor([1, 2]).cuda() + 1).tolist())
said["a thread's empty memory"] = in_thread(lambda: torch.empty(4, device="cuda").tolist())

known, other = torch.tensor([1, 2, 3], device="cuda"), torch.tensor([4, 5, 6], device="cuda")
said["known to a thread of C"] = raw(known.add_(1))
said["unknown to a thread of C"] = raw(torch.empty(3, device="cuda"))
in_thread(lambda: known.add_(other))
said["written by another thread"] = [known.tolist(), other.tolist()]
said["uploaded by another thread"] = in_thread(lambda: torch.tensor([8, 9]).cuda()).tolist()
written, read = (torch.tensor(values, device="cuda") for values in ([7, 7, 7], [1, 2, 3]))
increment[(1,)](written, read, 3, block=4)
said["a kernel of the script's own"] = [written.tolist(), read.tolist()]
ids, count = torch.tensor([5, 6], device="cuda"), torch.tensor(3, device="cuda")
counted(ids, count)
said["written by a compiled graph"] = [count.item(), ids.tolist()]
said["branch"] = bool(in_thread(lambda: torch.rand(4, device="cuda").sum() > 0))
print("SAID", json.dumps(said), flush=True)
