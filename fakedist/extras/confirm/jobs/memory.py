"""Jobs: the caching allocator itself: sizes at its borders, streams, graphs, offload to the host, too little memory."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from fakedist.extras.confirm.jobs.models import Transformer, language_loss, random_tokens

F: Any = torch.nn.functional

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Around every border that c10/cuda/CUDACachingAllocator.cpp knows: 512 B, 1 MiB, 10 MiB, 20 MiB, the 32 MiB that one
#: of the jobs sets as the limit of splits, and far above.
RANGES = (
    (1, 600),
    (KIB, 900 * KIB),
    (MIB - 600, MIB + 600),
    (MIB, 10 * MIB),
    (10 * MIB - 9, 21 * MIB),
    (30 * MIB, 200 * MIB),
)


def empty(num_bytes: int) -> Tensor:
    """A tensor of ``num_bytes`` on the device."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def allocations() -> None:
    """Thousands of allocations and frees at random on three streams; the cache is emptied now and then."""
    choose = random.Random(1)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    held: list[Tensor] = []
    for _ in range(4_000):
        if choose.random() < (0.75 if len(held) < 60 else 0.35) or not held:
            with torch.cuda.stream(choose.choice(streams)):
                held.append(empty(choose.randint(*choose.choice(RANGES))))
        else:
            held.pop(choose.randrange(len(held)))
        if choose.random() < 0.002:
            torch.cuda.empty_cache()
        if choose.random() < 0.002:
            del held[choose.randrange(len(held) + 1) :]


def out_of_memory() -> None:
    """A limit of 2 GiB: cached segments are given back for a large request, and some requests fail."""
    torch.cuda.set_per_process_memory_fraction(2 * GIB / torch.cuda.mem_get_info()[1])
    choose = random.Random(2)
    held: list[Tensor] = []
    for _ in range(1_500):
        if choose.random() < 0.6 or not held:
            with suppress(torch.OutOfMemoryError):
                held.append(empty(choose.randint(*choose.choice(RANGES))))
        else:
            held.pop(choose.randrange(len(held)))
    torch.cuda.set_per_process_memory_fraction(1.0)


def streams() -> None:
    """Tensors that another stream uses; their memory comes back once its work is done, here always waited for."""
    side = torch.cuda.Stream()
    for size in (600, 3 * MIB, 40 * MIB):
        for _ in range(5):
            given = empty(size)
            with torch.cuda.stream(side):
                used = given + 1
            given.record_stream(side)
            used.record_stream(torch.cuda.current_stream())
            del given
            torch.cuda.synchronize()
            del used
            torch.cuda.synchronize()
            empty(size // 2)


def cuda_graphs() -> None:
    """A training step captured as a whole, replayed; then layers made into graphs one by one, in one pool."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    given = torch.zeros(2048, 1024, device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss: Tensor = F.mse_loss(model(given).float(), given)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(3):
        given.copy_(torch.zeros(2048, 1024))
        graph.replay()
    between = empty(30 * MIB)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=graph.pool()):
        again = step()
    second.replay()
    del loss, again, between
    graph.reset()
    second.reset()
    torch.cuda.empty_cache()
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True).cuda()
    sample = torch.zeros(8, 256, 512, device="cuda", requires_grad=True)
    graphed: Any = torch.cuda.make_graphed_callables(layer, (sample,))
    for _ in range(2):
        graphed(torch.zeros(8, 256, 512, device="cuda", requires_grad=True)).sum().backward()


def offload() -> None:
    """Activations wait in pinned host memory for backward; the optimizer's state lives on the host."""
    model = Transformer(num_layers=3).cuda()
    tokens = random_tokens(4, 1024)
    masters = [parameter.detach().cpu().pin_memory() for parameter in model.parameters()]
    for master in masters:
        master.requires_grad_()
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(2):
        with save_on_cpu(pin_memory=True), torch.autocast("cuda", torch.bfloat16):
            loss = language_loss(model(tokens), tokens)
        loss.backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.to("cpu", non_blocking=True)
            parameter.grad = None
        torch.cuda.synchronize()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master, non_blocking=True)
        torch.cuda.synchronize()
