"""Small jobs, each with a fault that a finding names, and their twins without it: ``faults.py FD101 [mended]``."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

WIDTH, TOKENS, VOCABULARY, NUM_LAYERS = 256, 2048, 8192, 3
NUM_STEPS = 12
Step = Callable[[], None]


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY, dropout: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(tokens))


def make_tokens(vocabulary: int = VOCABULARY, number: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, vocabulary, (number,), device="cuda")


def train(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    reduce: Step = lambda: None,
) -> Step:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        loss_of().backward()
        reduce()
        optimizer.step()
        optimizer.zero_grad()

    return step


def logits_loss(model: Model) -> Callable[[], torch.Tensor]:
    tokens = make_tokens(model.embed.num_embeddings)
    return lambda: F.cross_entropy(model(tokens), tokens)


def chunked_loss(mended: bool) -> Step:
    model = Model().to("cuda", torch.bfloat16)
    tokens = make_tokens(number=4 * TOKENS)

    def of_chunk(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(x).float(), y, reduction="sum")

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            x, total = self.model.features(y), torch.zeros((), device="cuda")
            for part, labels in zip(x.chunk(8), y.chunk(8), strict=True):
                total = total + (
                    checkpoint(of_chunk, part, labels, use_reentrant=False) if mended else of_chunk(part, labels)
                )
            return total / len(y)

    whole = Whole()
    return train(whole, lambda: whole(tokens))


def copied_logits(mended: bool) -> Step:
    model, tokens = Model().to("cuda", torch.bfloat16), make_tokens()
    kept: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        kept.clear()
        if mended:
            return F.cross_entropy(model(tokens), tokens)
        logits = model(tokens)
        wide = logits.float()
        shifted = wide[:-1].contiguous()
        kept.extend((logits, wide, shifted))
        return F.cross_entropy(shifted, tokens[1:])

    return train(model, loss)


def whole_gradients(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens(number=64)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    def loss() -> torch.Tensor:
        model.set_requires_gradient_sync(mended)
        F.cross_entropy(model(tokens), tokens).backward()
        model.set_requires_gradient_sync(True)
        return F.cross_entropy(model(tokens), tokens)

    return train(model, loss)


def gathered_parameters(mended: bool) -> Step:
    model, tokens = Model(width=512).to("cuda"), make_tokens(number=64)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=mended)
    fully_shard(model)
    return train(model, lambda: F.cross_entropy(model(tokens), tokens))


def unfused_optimizer(mended: bool) -> Step:
    model, tokens = Model(width=1024).to("cuda"), make_tokens(number=64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=mended, foreach=not mended)
    return train(model, lambda: F.cross_entropy(model(tokens), tokens), optimizer)


def many_communicators(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens(number=64)
    everyone = list(range(dist.get_world_size()))
    shared = dist.new_group(everyone)
    groups = [shared if mended else dist.new_group(everyone) for _ in range(12)]

    def loss() -> torch.Tensor:
        value = F.cross_entropy(model(tokens), tokens)
        for group in groups:
            dist.all_reduce(value.detach().clone(), group=group)
        return value

    return train(model, loss)


def graph_pools(mended: bool) -> Step:
    model = Model().to("cuda")
    graphs, inputs = [], []
    pool = torch.cuda.graph_pool_handle() if mended else None
    with torch.no_grad():
        for number in (TOKENS, TOKENS // 2, TOKENS // 4, TOKENS // 8):
            tokens = make_tokens(number=number)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                model(tokens)
            graphs.append(graph)
            inputs.append(tokens)
    small = make_tokens(number=64)

    def loss() -> torch.Tensor:
        graphs[0].replay()
        return F.cross_entropy(model(small), small)

    return train(model, loss)


def kept_losses(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens()
    losses: list[torch.Tensor] = []

    def loss() -> torch.Tensor:
        value = model(tokens).square().mean()
        outputs = model.features(tokens)
        losses.append(outputs.detach().sum() if mended else outputs)
        return value

    return train(model, loss)


def large_bucket(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens(number=64)
    size = sum(parameter.numel() for parameter in model.parameters())

    def reduce() -> None:
        dist.all_reduce(torch.empty(size if mended else 4 * size, device="cuda"))

    return train(model, lambda: F.cross_entropy(model(tokens), tokens), reduce=reduce)


def dropped_activations(mended: bool) -> Step:
    model = Model(vocabulary=512, dropout=0.0 if mended else 0.1).to("cuda")
    return train(model, logits_loss(model))


def reduced_each_micro_batch(mended: bool) -> Step:
    model, tokens = DistributedDataParallel(Model().to("cuda")), make_tokens(number=256)

    def loss() -> torch.Tensor:
        with model.no_sync() if mended else nullcontext():
            for _ in range(3):
                F.cross_entropy(model(tokens), tokens).backward()
        return F.cross_entropy(model(tokens), tokens)

    return train(model, loss)


def small_collectives(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens(number=256)
    parts = [torch.zeros(1024, device="cuda") for _ in range(200)]

    def reduce() -> None:
        for part in [torch.cat(parts)] if mended else parts:
            dist.all_reduce(part)

    return train(model, lambda: F.cross_entropy(model(tokens), tokens), reduce=reduce)


def many_models(mended: bool) -> Step:
    """DDP broadcasts the sizes of its buckets in the second step alone, here for 40 models in a row."""
    models = nn.ModuleList(DistributedDataParallel(nn.Linear(WIDTH, 1024).to("cuda")) for _ in range(40))
    x = torch.randn(64, WIDTH, device="cuda")
    return train(models, lambda: torch.stack([model(x).sum() for model in models]).sum())


def host_waits(mended: bool) -> Step:
    model = Model(vocabulary=512, width=1024).to("cuda", torch.bfloat16)
    tokens = make_tokens(512)

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            x = self.model.embed(y)
            for layer in self.model.layers:
                x = layer(x)
                for _ in range(0 if mended else 20):
                    x.max().item()
            return self.model.head(x)

    waits = Waits()
    return train(waits, lambda: F.cross_entropy(waits(tokens), tokens))


def late_launches(mended: bool) -> Step:
    model = Model().to("cuda")
    tokens = make_tokens(number=16 * TOKENS if mended else 64)

    def loss() -> torch.Tensor:
        value = F.cross_entropy(model(tokens), tokens)
        for _ in range(0 if mended else 400):
            value = value * 1.001
        return value

    return train(model, loss)


def plain_products(mended: bool) -> Step:
    torch.backends.cuda.matmul.allow_tf32 = mended
    model = Model(width=1024).to("cuda")
    return train(model, logits_loss(model))


def odd_vocabulary(mended: bool) -> Step:
    model = Model(vocabulary=8192 if mended else 8191, width=1024).to("cuda", torch.bfloat16)
    return train(model, logits_loss(model))


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:  # decodes
            pass
        return torch.full((64,), index % 512)


def slow_loading(mended: bool) -> Step:
    model = Model(vocabulary=512).to("cuda")
    batches: Iterator[torch.Tensor] = iter(DataLoader(Slow(), batch_size=8))
    ready = itertools.repeat(next(batches)) if mended else batches

    def loss() -> torch.Tensor:
        tokens = next(ready).flatten().to("cuda", non_blocking=True)
        return F.cross_entropy(model(tokens), tokens)

    return train(model, loss)


def augmented_on_cpu(mended: bool) -> Step:
    model, tokens = Model(vocabulary=512).to("cuda"), make_tokens(512)

    def loss() -> torch.Tensor:
        torch.rand(1 << 23, device="cuda" if mended else "cpu").sort()
        return F.cross_entropy(model(tokens), tokens)

    return train(model, loss)


def replicated_state(mended: bool) -> Step:
    model, tokens = Model(vocabulary=65536, width=1024).to("cuda"), make_tokens(number=64)
    if mended:
        fully_shard(model)
        return train(model, lambda: F.cross_entropy(model(tokens), tokens))
    replica = DistributedDataParallel(model)
    sharded = "zero1" in sys.argv  # parameters and gradients are replicated by choice
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW) if sharded else None
    return train(replica, lambda: F.cross_entropy(replica(tokens), tokens), optimizer)


def half_state(mended: bool) -> Step:
    model, tokens = Model().to("cuda", torch.float32 if mended else torch.bfloat16), make_tokens(number=64)
    cast = torch.autocast("cuda", torch.bfloat16) if mended else nullcontext()

    def loss() -> torch.Tensor:
        with cast:
            return F.cross_entropy(model(tokens), tokens)

    return train(model, loss)


def cast_activations(mended: bool) -> Step:
    model = Model(vocabulary=512).to("cuda", torch.bfloat16 if mended else torch.float32)
    tokens = make_tokens(512, 8 * TOKENS)

    def loss() -> torch.Tensor:
        with nullcontext() if mended else torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(tokens).float(), tokens)

    return train(model, loss)


def kept_evaluation(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens(number=512)
    step = train(model, lambda: F.cross_entropy(model(tokens), tokens))
    kept: list[torch.Tensor] = []

    def evaluated() -> None:
        step()
        model.eval()
        with torch.no_grad():
            kept.clear()
            for _ in range(8):
                logits = model(tokens)
                kept.append(logits.argmax(-1) if mended else logits)
        model.train()

    return evaluated


def evaluation_of_rank_0(mended: bool) -> Step:
    model, tokens = Model(width=1024).to("cuda"), make_tokens()

    @torch.no_grad()
    def evaluate() -> None:
        if mended or dist.get_rank() == 0:
            model(tokens)

    return train(model, lambda: F.cross_entropy(model(tokens), tokens), reduce=evaluate)


def uneven_batches(mended: bool) -> Step:
    model = Model().to("cuda")
    tokens = make_tokens(number=512 if mended or dist.get_rank() else 384)
    return train(model, lambda: F.cross_entropy(model(tokens), tokens))


class Adapter(nn.Module):
    """A frozen layer with a trained branch of low rank, in a dtype of its own."""

    def __init__(self, base: nn.Linear, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(base.in_features, 8, bias=False, device="cuda", dtype=dtype)
        self.up = nn.Linear(8, base.out_features, bias=False, device="cuda", dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.up(self.down(self.dropout(x.to(self.down.weight.dtype))))
        return self.base(x) + branch.to(x.dtype)


def adapted(mended: bool) -> Step:
    model = Model(vocabulary=512, width=1024).to("cuda", torch.bfloat16).requires_grad_(False)
    settings = (0.0, torch.bfloat16) if mended else (0.1, torch.float32)
    for layer in model.layers:
        layer.up, layer.down = Adapter(layer.up, *settings), Adapter(layer.down, *settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(model, logits_loss(model), torch.optim.AdamW(trained, fused=True))


def swapped_axes(mended: bool) -> Step:
    names = ("replicate", "shard") if mended else ("shard", "replicate")
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=names)
    model, tokens = Model().to("cuda"), make_tokens(number=64)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, lambda: F.cross_entropy(model(tokens), tokens))


def fragmented(mended: bool) -> Step:
    if mended:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    model = Model().to("cuda")
    lengths = (int(TOKENS * 1.4**step) for step in itertools.count())

    def loss() -> torch.Tensor:
        tokens = make_tokens(number=next(lengths))
        return F.cross_entropy(model(tokens), tokens)

    return train(model, loss)


def retried(mended: bool) -> Step:
    model, tokens = Model().to("cuda"), make_tokens(number=64)
    side = torch.cuda.current_stream() if mended else torch.cuda.Stream()

    def loss() -> torch.Tensor:
        value = F.cross_entropy(model(tokens), tokens)
        with torch.cuda.stream(side):
            torch.zeros(300 << 20, dtype=torch.uint8, device="cuda")
        torch.zeros(500 << 20, dtype=torch.uint8, device="cuda")
        return value

    # Without state, which the first step would put into a free block of these 500 MiB: it then stays.
    return train(model, loss, torch.optim.SGD(model.parameters()))


def unpacked(mended: bool) -> Step:
    model = Model().to("cuda", torch.bfloat16)
    lengths = (1024, 512, 256, 256)
    packed = make_tokens(number=sum(lengths))
    place = torch.cat([torch.arange(length, device="cuda") + row * 1024 for row, length in enumerate(lengths)])

    def loss() -> torch.Tensor:
        logits = model(packed)
        if mended:
            each = F.cross_entropy(logits.float(), packed, reduction="none")
            return each.new_zeros(4 * 1024).index_put((place,), each).sum() / len(packed)
        dense = logits.new_zeros(4 * 1024, VOCABULARY).index_put((place,), logits)
        labels = packed.new_full((4 * 1024,), -100).index_put((place,), packed)
        return F.cross_entropy(dense.float(), labels)

    return train(model, loss)


def calls_of_rank_0(mended: bool) -> Step:
    if not mended and "models" in sys.argv:  # rank 1 expects more of DDP's broadcast than rank 0 sends
        DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(1 + dist.get_rank())]).cuda())
    model, tokens = Model().to("cuda"), make_tokens(number=64)

    def reduce() -> None:
        if mended or dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1, device="cuda"))
        dist.all_reduce(model.head.weight.grad)

    return train(model, lambda: F.cross_entropy(model(tokens), tokens), reduce=reduce)


def recomputed_together(mended: bool) -> Step:
    model = Model(vocabulary=512, width=512)
    model.layers.extend(Block(512) for _ in range(3))
    tokens = make_tokens(512, 2 * TOKENS)

    def two_passes(y: torch.Tensor) -> torch.Tensor:
        results = []
        for scale in (1.0, 0.5):
            x = model.embed(y) * scale
            for layer in model.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            if mended:
                torch._dynamo.graph_break()
            results.append(model.head(x))
        return sum(F.cross_entropy(logits, y) for logits in results)

    model.forward = two_passes
    model.to("cuda", torch.bfloat16).compile()
    return train(model, lambda: model(tokens))


def reduced_in_hooks(mended: bool) -> Step:
    model = Model(vocabulary=512, width=1024).to("cuda", torch.bfloat16)
    works: list[dist.Work] = []

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        if not mended:
            works.pop().wait()

    def wait() -> None:
        while works:
            works.pop().wait()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)
    return train(model, logits_loss(model), reduce=wait)


FAULTS: dict[str, Callable[[bool], Step]] = {
    "FD101": chunked_loss,
    "FD102": copied_logits,
    "FD103": whole_gradients,
    "FD104": gathered_parameters,
    "FD105": unfused_optimizer,
    "FD106": many_communicators,
    "FD107": graph_pools,
    "FD108": kept_losses,
    "FD109": kept_evaluation,
    "FD110": large_bucket,
    "FD111": half_state,
    "FD112": adapted,
    "FD113": swapped_axes,
    "FD114": recomputed_together,
    "FD115": fragmented,
    "FD116": retried,
    "FD118": unpacked,
    "FD117": dropped_activations,
    "casts": cast_activations,
    "FD201": reduced_each_micro_batch,
    "FD202": small_collectives,
    "models": many_models,
    "FD203": host_waits,
    "FD204": late_launches,
    "FD205": plain_products,
    "FD206": odd_vocabulary,
    "FD207": reduced_in_hooks,
    "FD208": slow_loading,
    "cpu": augmented_on_cpu,
    "FD301": calls_of_rank_0,
    "FD302": evaluation_of_rank_0,
    "FD303": uneven_batches,
    "FD304": replicated_state,
}

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    run_step = FAULTS[sys.argv[1]]("mended" in sys.argv)
    for _ in range(NUM_STEPS):
        run_step()
    torch.cuda.synchronize()
    dist.destroy_process_group()
