"""A transformer by a schedule of torch.distributed.pipelining, on two pipelines.

SCHEDULE MICRO_BATCHES LAYERS [VOCABULARY [LAYERS_OF_STAGE,...]]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

WIDTH, TOKENS = 2048, 2048


class Layer(nn.Module):
    """Attention and two products, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).view(*x.shape[:2], 3, -1, 128).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.second(x))))


class Model(nn.Module):
    """Some layers of the model, the embedding before the first and the head after the last."""

    def __init__(self, numbers: range, vocabulary: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH) if is_first else None
        self.layers = nn.ModuleDict({str(number): Layer() for number in numbers})
        self.norm = nn.RMSNorm(WIDTH) if is_last else None
        self.head = nn.Linear(WIDTH, vocabulary, bias=False) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def main(name: str, micro_batches: int, num_layers: int, vocabulary: int = 32_000, layout: str = "") -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    group = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp")).get_group("pp")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if name in ("GPipe", "1F1B"):
        mine = [rank]
    else:
        mine = [rank, 2 * ranks - 1 - rank] if "V" in name else [rank, rank + ranks]
    num_stages = ranks * len(mine)
    sizes = [*map(int, layout.split(","))] if layout else [num_layers // num_stages] * num_stages
    example = torch.empty(1, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    tokens = torch.zeros(1, TOKENS, device="cuda", dtype=torch.int64)
    modules, stages = [], []
    for stage in mine:
        is_first, is_last = stage == 0, stage == num_stages - 1
        begin = sum(sizes[:stage])
        module = Model(range(begin, begin + sizes[stage]), vocabulary, is_first, is_last).to("cuda", torch.bfloat16)
        out = example.new_empty(1, TOKENS, vocabulary if is_last else WIDTH).requires_grad_()
        inputs = (tokens if is_first else example.clone().requires_grad_(),)
        modules.append(module)
        stages.append(
            pipelining.PipelineStage(
                module,
                stage,
                num_stages,
                torch.device("cuda", 0),
                input_args=inputs,
                output_args=(out,),
                group=group,
            )
        )
    schedule: Any = getattr(pipelining, f"Schedule{name}")
    made = schedule(stages if len(mine) > 1 else stages[0], micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([each for module in modules for each in module.parameters()], lr=0.1)
    batch = torch.zeros(micro_batches, TOKENS, device="cuda", dtype=torch.int64)
    for _ in range(3):
        last = num_stages - 1 in mine
        losses: list[Tensor] | None = [] if last else None
        made.step(*((batch,) if 0 in mine else ()), target=batch if last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
