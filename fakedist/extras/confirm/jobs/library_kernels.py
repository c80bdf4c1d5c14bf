"""Jobs: operations whose kernels take memory of their own from the allocator, and how much is the library's choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fakedist.extras.confirm.jobs.models import ConvNet, random_tokens
from fakedist.extras.confirm.jobs.reading import reading

#: ``torch.nn.functional``; arguments are unpacked in ways that its annotations do not follow.
F: Any = torch.nn.functional


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
