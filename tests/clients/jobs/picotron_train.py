"""After picotron's train.py: ``picotron_train.py``, tensor, pipeline and data parallelism, each by hand; 1F1B.

Ranks are a grid of data (slowest), pipeline and tensor parallelism of two each. A rank adds its gradients up in fp32
buckets, from hooks on autograd's accumulating nodes. Runs on GPUs too, under torchrun. Tokens are random.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable

TP, PP, STEPS, MICRO_BATCHES, BATCH, LENGTH = 2, 2, 6, 4, 2, 512
WIDTH, FFN, LAYERS, HEADS, VOCABULARY, BUCKET = 1024, 2816, 4, 16, 8192, 25 * 2**18


class Grid:
    """This rank's groups, and its neighbours in the pipeline."""

    def __init__(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        ranks = torch.arange(world).view(world // (TP * PP), PP, TP)
        self.dp, self.pp, self.tp = (int(place) for place in (ranks == rank).nonzero()[0])
        by_tp = [line.tolist() for line in ranks.reshape(-1, TP)]
        by_dp = [line.tolist() for line in ranks.permute(1, 2, 0).reshape(PP * TP, -1)]
        self.tp_group = dist.new_subgroups_by_enumeration(by_tp)[0]
        self.dp_group = dist.new_subgroups_by_enumeration(by_dp)[0]
        self.before, self.after = rank - TP, rank + TP
        self.is_first, self.is_last = self.pp == 0, self.pp == PP - 1


class Reduce(torch.autograd.Function):
    """Sum over the ranks of tensor parallelism in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        dist.all_reduce(x, group=grid.tp_group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class LinearWithAsyncAllReduce(torch.autograd.Function):
    """A product whose input's gradient is summed while that of its weight is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid = grid
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_input = gradients[0] @ weight
        handle = dist.all_reduce(grad_input, group=ctx.grid.tp_group, async_op=True)
        grad_weight = gradients[0].flatten(0, 1).t() @ x.flatten(0, 1)
        handle.wait()
        return grad_input, grad_weight, None


class ColumnParallelLinear(nn.Module):
    """Half of the outputs."""

    def __init__(self, grid: Grid, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grid = grid
        self.weight = nn.Parameter(torch.empty(outputs // TP, inputs).uniform_(-0.02, 0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = LinearWithAsyncAllReduce.apply(x, self.weight, self.grid)
        return y


class RowParallelLinear(nn.Module):
    """Half of the inputs."""

    def __init__(self, grid: Grid, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grid = grid
        self.weight = nn.Parameter(torch.empty(outputs, inputs // TP).uniform_(-0.02, 0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Reduce.apply(F.linear(x, self.weight), self.grid)
        return y


class VocabParallelEmbedding(nn.Module):
    """Half of the words; those of the other half are zeros until the ranks add theirs."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid, self.first = grid, grid.tp * VOCABULARY // TP
        self.weight = nn.Parameter(torch.randn(VOCABULARY // TP, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        elsewhere = (tokens < self.first) | (tokens >= self.first + VOCABULARY // TP)
        local = tokens - self.first
        local[elsewhere] = 0
        embedded = F.embedding(local, self.weight)
        embedded[elsewhere, :] = 0.0
        y: torch.Tensor = Reduce.apply(embedded, self.grid)
        return y


class FinalProjection(ColumnParallelLinear):
    """Half of the words, gathered."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = super().forward(x)
        parts = [torch.empty_like(own) for _ in range(TP)]
        dist.all_gather(parts, own.detach().contiguous(), group=self.grid.tp_group)
        parts[self.grid.tp] = own
        return torch.cat(parts, dim=-1)


class DecoderLayer(nn.Module):
    """Attention with half of the heads, and half of a gated MLP."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (ColumnParallelLinear(grid, WIDTH, WIDTH) for _ in range(3))
        self.out_proj = RowParallelLinear(grid, WIDTH, WIDTH)
        self.gate_proj, self.up_proj = (ColumnParallelLinear(grid, WIDTH, FFN) for _ in range(2))
        self.down_proj = RowParallelLinear(grid, FFN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.input_layernorm(x)
        q, k, v = (
            projected(h).view(batch, length, HEADS // TP, WIDTH // HEADS).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out_proj(y)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Stage(nn.Module):
    """A half of the layers, with the embedding before the first and the projection behind the last."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(grid) if grid.is_first else nn.Identity()
        self.decoder_layers = nn.ModuleList(DecoderLayer(grid) for _ in range(LAYERS // PP))
        self.final_norm = nn.RMSNorm(WIDTH) if grid.is_last else nn.Identity()
        self.final_proj = FinalProjection(grid, WIDTH, VOCABULARY) if grid.is_last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.decoder_layers:
            x = layer(x)
        return self.final_proj(self.final_norm(x))


class DataParallelBucket(nn.Module):
    """Gradients in fp32 buckets, each summed over data parallelism once the last micro-batch has filled it."""

    def __init__(self, module: Stage, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.module, self.group, self.sync, self.waits = module, group, True, False
        self.buckets: list[torch.Tensor] = []
        self.left: list[set[int]] = []
        self.works: list[dist.Work] = []
        self.accumulating = []
        parts: list[list[nn.Parameter]] = [[]]
        for param in module.parameters():
            if parts[-1] and sum(p.numel() for p in parts[-1]) + param.numel() > BUCKET:
                parts.append([])
            parts[-1].append(param)
        self.parts = parts
        for number, part in enumerate(parts):
            bucket = torch.zeros(sum(p.numel() for p in part), dtype=torch.float32, device=part[0].device)
            views = bucket.split([p.numel() for p in part])
            self.buckets.append(bucket)
            for param, view in zip(part, views, strict=True):
                param.main_grad = view.view_as(param)
                node = param.expand_as(param).grad_fn.next_functions[0][0]
                node.register_hook(self._hook(param, number))
                self.accumulating.append(node)
        self.reset()

    def reset(self) -> None:
        """Empty the buckets for the next step."""
        self.left = [{id(param) for param in part} for part in self.parts]
        for bucket in self.buckets:
            bucket.zero_()

    def _hook(self, param: nn.Parameter, number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            param.main_grad.add_(param.grad.data)
            param.grad = None
            if not self.sync:
                return
            if not self.waits:
                Variable._execution_engine.queue_callback(self._after_backward)
                self.waits = True
            self.left[number].discard(id(param))
            if not self.left[number]:
                self.buckets[number] /= dist.get_world_size(self.group)
                self.works.append(dist.all_reduce(self.buckets[number], group=self.group, async_op=True))

        return hook

    def _after_backward(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.waits = [], False
        for param in self.module.parameters():
            param.grad = param.main_grad.to(param.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Pipeline:
    """1F1B over this rank's stage, which receives from the one before and sends to the one after."""

    def __init__(self, grid: Grid, model: DataParallelBucket) -> None:
        self.grid, self.model = grid, model

    def exchange(self, send: torch.Tensor | None, to: int, receive: bool, source: int) -> torch.Tensor | None:
        """Send, receive, or both, and wait."""
        received = None
        ops = [] if send is None else [dist.P2POp(dist.isend, send, to)]
        if receive:
            received = torch.empty((BATCH, LENGTH, WIDTH), requires_grad=True, device="cuda", dtype=torch.bfloat16)
            ops.append(dist.P2POp(dist.irecv, received, source))
        for request in dist.batch_isend_irecv(ops) if ops else []:
            request.wait()
        torch.cuda.synchronize()
        return received

    def forward(self, x: torch.Tensor | None, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The stage's output; the loss on the last."""
        y = self.model(tokens[:, :-1] if x is None else x)
        if not self.grid.is_last:
            return y, 0.0
        loss = F.cross_entropy(y.transpose(1, 2), tokens[:, 1:]) / MICRO_BATCHES
        return loss, loss.item()

    def backward(self, x: torch.Tensor | None, y: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of what the stage received."""
        torch.autograd.backward(y, grad_tensors=torch.ones_like(y) if gradient is None else gradient)
        return None if x is None else x.grad

    def step(self, batches: list[torch.Tensor]) -> float:
        """All micro-batches; the sum of their losses."""
        grid = self.grid
        warmup = min(PP - grid.pp - 1, len(batches))
        flying: list[tuple[torch.Tensor | None, torch.Tensor]] = []
        total, self.model.sync = 0.0, False
        for batch in batches[:warmup]:
            x = self.exchange(None, 0, not grid.is_first, grid.before)
            y, _ = self.forward(x, batch)
            self.exchange(y, grid.after, False, 0)
            flying.append((x, y))
        x = self.exchange(None, 0, not grid.is_first, grid.before)
        for number, batch in enumerate(batches[warmup:], start=1):
            y, loss = self.forward(x, batch)
            total += loss
            gradient = None if grid.is_last else self.exchange(y, grid.after, True, grid.after)
            flying.append((x, y))
            is_last = number == len(batches) - warmup
            self.model.sync = is_last and not warmup
            sent = self.backward(*flying.pop(0), gradient)
            if not grid.is_first:
                x = self.exchange(sent, grid.before, not is_last, grid.before)
        while flying:
            self.model.sync = len(flying) == 1
            gradient = self.exchange(None, 0, True, grid.after)
            sent = self.backward(*flying.pop(0), gradient)
            if not grid.is_first:
                self.exchange(sent, grid.before, False, 0)
        return total


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    dist.init_process_group("nccl", init_method="env://")
    grid = Grid()
    torch.manual_seed(42)
    generator = torch.Generator().manual_seed(grid.dp)
    model = DataParallelBucket(Stage(grid).to(torch.bfloat16).to(device), grid.dp_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    dist.barrier()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES, BATCH, LENGTH + 1), generator=generator)
        loss = Pipeline(grid, model).step([batch.to(device) for batch in tokens])
        reduced = torch.tensor([loss], device=device)
        dist.all_reduce(reduced, group=grid.dp_group)
        optimizer.step()
        model.reset()
        if grid.is_last and grid.tp == 0 and grid.dp == 0:
            print(f"step {step} loss {reduced.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
