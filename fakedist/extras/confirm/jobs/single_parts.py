"""Jobs of single parts: the caching allocator itself (sizes at its borders, streams, graphs, offload to the host, too
little memory), and operations whose kernels take memory of their own from it, where how much is the library's choice.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from fakedist.extras.confirm.jobs.training import ConvNet, F, Transformer, language_loss, random_tokens, reading

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
    """So many bytes on the device."""
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


def convnet(layout: str) -> None:
    """A residual network; cuDNN's plans and their workspaces."""
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    model = ConvNet().cuda().to(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.zeros(32, 3, 224, 224, device="cuda").to(memory_format=memory_format)
    labels = torch.zeros(32, dtype=torch.long, device="cuda")
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16, enabled=layout == "channels_last"):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def lstm() -> None:
    """Two layers of an LSTM, a GRU that looks both ways, in cuDNN."""
    embedding = nn.Embedding(8_000, 512).cuda()
    layers = nn.LSTM(512, 1024, 2, batch_first=True, dropout=0.1).cuda()
    both_ways = nn.GRU(1024, 256, bidirectional=True, batch_first=True).cuda()
    output = nn.Linear(512, 8_000).cuda()
    modules = nn.ModuleList((embedding, layers, both_ways, output))
    optimizer = torch.optim.Adam(modules.parameters())
    tokens = random_tokens(16, 128, 8_000)
    for _ in range(3):
        x, _ = layers(embedding(tokens))
        x, _ = both_ways(x)
        F.cross_entropy(output(x).flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def matmuls() -> None:
    """Every way into cuBLAS and cuBLASLt, with shapes on both sides of their thresholds, on two streams."""

    def products() -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            for rows, inner, columns in (
                (64, 64, 64),
                (512, 1024, 768),
                (1, 4096, 4096),
                (4096, 4096, 1),
                (33, 65, 129),
            ):
                left = torch.zeros(rows, inner, device="cuda", dtype=dtype)
                right = torch.zeros(inner, columns, device="cuda", dtype=dtype)
                bias = torch.zeros(columns, device="cuda", dtype=dtype)
                torch.mm(left, right)
                torch.addmm(bias, left, right)
                F.linear(left, right.t(), bias)
                F.linear(left, right.t().contiguous(), bias)
                torch.mv(right.t(), left[0])
                torch.bmm(left.expand(4, rows, inner), right.expand(4, inner, columns))
                torch.baddbmm(bias.expand(4, 1, columns), left.expand(4, rows, inner), right.expand(4, inner, columns))
                torch.einsum("ij,kj->ik", left, right.t())
                torch._addmm_activation(bias, left, right)
        eight = torch.zeros(64, 64, device="cuda", dtype=torch.int8)
        torch._int_mm(eight, eight.t())
        torch.dot(torch.zeros(999, device="cuda"), torch.zeros(999, device="cuda"))

    products()
    with torch.cuda.stream(torch.cuda.Stream()):
        products()
    torch.backends.cuda.matmul.allow_tf32 = True
    products()


def sorts_and_scans() -> None:
    """CUB's and thrust's temporary storage: sort, scan, top-k, scatter, embedding gradients, sampling."""
    for size in (1_000, 4_097, 1_000_003, 5_000_000):
        values = torch.zeros(size, device="cuda")
        whole = torch.zeros(size, device="cuda", dtype=torch.long)
        torch.sort(values)
        torch.sort(values, stable=True, descending=True)
        torch.argsort(whole)
        torch.cumsum(values, 0)
        torch.cumsum(whole, 0)
        torch.cumprod(values, 0)
        torch.cummax(values, 0)
        torch.logcumsumexp(values, 0)
        torch.topk(values, 100)
        torch.kthvalue(values, 10)
        torch.median(values)
        torch.histc(values, 100, 0, 1)
        torch.index_add(values, 0, whole, values)
        values.clone().index_put_((whole,), values, accumulate=True)
        values.clone().scatter_add_(0, whole, values)
        torch.gather(values, 0, whole)
        torch.roll(values, 7)
        torch.flip(values, (0,))
    rows = torch.zeros(512, 32_000, device="cuda")
    torch.sort(rows, dim=1)
    torch.topk(rows, 50, dim=1)
    torch.cumsum(rows.softmax(1), 1)
    torch.randperm(1_000, device="cuda")
    torch.randperm(1_000_000, device="cuda")
    torch.quantile(rows[:, :1_000], 0.5, dim=1)
    for vocab_size, number in ((1_000, 64), (32_000, 8_192), (100_000, 100_000)):
        weight = torch.zeros(vocab_size, 64, device="cuda", requires_grad=True)
        F.embedding(random_tokens(1, number, vocab_size), weight, scale_grad_by_freq=number > 64).sum().backward()
        bags = torch.arange(0, number, 8, device="cuda")
        F.embedding_bag(random_tokens(1, number, vocab_size)[0], weight, bags, mode="max").sum().backward()


def sizes_by_values() -> None:
    """Operations whose result's size, or whose checks, follow values: nonzero, unique, bincount, sampling, masks."""
    with reading():
        whole = torch.arange(3_000, device="cuda")
        odd = whole % 2 == 1
        torch.nonzero(odd)
        torch.where(odd)
        torch.masked_select(whole, odd)
        torch.unique(whole % 7, return_inverse=True, return_counts=True)
        torch.unique_consecutive(whole // 5)
        torch.bincount(whole % 11)
        torch.repeat_interleave(whole[:10])
        F.one_hot(whole % 3)
        torch.multinomial(torch.ones(4, 100, device="cuda"), 1)
        torch.multinomial(torch.ones(4, 100, device="cuda"), 5)
        torch.multinomial(torch.ones(4, 100, device="cuda"), 5, replacement=True)


def subclass_shortcuts() -> None:
    """Operations that torch runs out of place in a dispatch mode: derivatives of indexing, masks and extremes."""
    x = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
    rows = torch.arange(0, 1024, 2, device="cuda")
    mask = torch.zeros(1024, 1024, device="cuda", dtype=torch.bool)
    for derive in (
        lambda: x[rows],
        lambda: x[:, rows],
        lambda: x.masked_fill(mask, 0.0),
        lambda: x.max(1).values,
        lambda: x.amax(1),
        lambda: x.sort(1).values,
        lambda: x.topk(5, 1).values,
        lambda: x.gather(1, rows.expand(1024, 512)),
        lambda: x.index_select(0, rows),
        lambda: x.index_add(0, rows, x[:512]),
        lambda: x.cumsum(1),
        lambda: x.std(1),
        lambda: x.norm(dim=1),
        lambda: x.unfold(0, 4, 4),
        lambda: torch.where(mask, x, 1.0),
        lambda: torch.nn.functional.linear(x.unsqueeze(0).transpose(0, 1), x, x[0]),
        lambda: torch.logsumexp(x, 1),
        lambda: x.softmax(1).log(),
        lambda: x.repeat(2, 1),
        lambda: x + x + x,
        lambda: x.diagonal(),
        lambda: x[2:7] * x[3:8],
    ):
        derive().sum().backward()
    F.scaled_dot_product_attention(
        *(x.view(1, 16, 1024, 64) for _ in "qkv"), attn_mask=mask[:1024, :1024]
    ).sum().backward()


def reductions() -> None:
    """Reductions over every axis: those that blocks share take a buffer, by the number of SMs."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((3,), (1 << 24,), (8, 1 << 20), (1 << 20, 8), (64, 128, 4096), (4096, 4097)):
            values = torch.zeros(shape, device="cuda", dtype=dtype)
            for axis in (None, 0, -1):
                for reduce in (torch.sum, torch.mean, torch.amax, torch.std, torch.linalg.vector_norm, torch.argmax):
                    reduce(values) if axis is None else reduce(values, dim=axis)
            torch.isnan(values).any()
            torch._foreach_norm([values, values])
    for channels, features in ((64, 4096), (2048, 1024), (8192, 512)):
        x = torch.zeros(channels, features, device="cuda", requires_grad=True)
        F.layer_norm(
            x, (features,), *(torch.ones(features, device="cuda", requires_grad=True) for _ in "wb")
        ).sum().backward()
        F.rms_norm(x, (features,), torch.ones(features, device="cuda", requires_grad=True)).sum().backward()
        F.group_norm(x.view(channels, 32, -1), 8).sum().backward()
        F.group_norm(
            x.view(channels, 32, -1), 8, *(torch.ones(32, device="cuda", requires_grad=True) for _ in "wb")
        ).sum().backward()
        F.log_softmax(x, -1).sum().backward()
        F.dropout(F.gelu(x), 0.1).sum().backward()
        torch.nn.functional.nll_loss(
            F.log_softmax(x, -1), torch.zeros(channels, dtype=torch.long, device="cuda")
        ).backward()


def optimizers() -> None:
    """Every optimizer's state and temporaries, one tensor after the other, foreach and fused."""
    sizes = ((1024, 1024), (1024,), (4096, 300), (7,), (129, 65))
    makers: tuple[Any, ...] = (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
    )
    for make in makers:
        for way in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}):
            if "fused" in way and make not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
                continue
            parameters = [nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes]
            optimizer = make(parameters, lr=1e-3, **way)
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.zeros_like(parameter)
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
