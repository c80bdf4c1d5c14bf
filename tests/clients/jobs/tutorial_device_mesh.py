"""Jobs written after PyTorch's tutorials (pytorch/examples, distributed): python tutorial_device_mesh.py TUTORIAL.

Like those they never call ``set_device``: the device mesh chooses the rank's device, because CUDA is not initialised.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_default_backend_for_device, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, WORDS, TOKENS = 256, 1024, 64
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 4 * WIDTH)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(self.relu(self.in_proj(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed = Toy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.feed(self.norm(x))
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.output(self.norm(x))
        return out


def tensor_parallel() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Megatron's split of two linear layers."""
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    plan = {"in_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
    return parallelize_module(Toy().to("cuda"), mesh, plan), lambda: torch.rand(20, WIDTH, device="cuda")


def sequence_parallel() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The same with inputs and outputs that are sharded too."""
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    split = {"in_proj": ColwiseParallel(input_layouts=Shard(0)), "out_proj": RowwiseParallel(output_layouts=Shard(0))}
    return parallelize_module(Toy().to("cuda"), mesh, split), lambda: torch.rand(20, WIDTH, device="cuda")


def fsdp_and_tensor_parallel() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """FSDP across the mesh's first axis, tensor and sequence parallel along the second."""
    mesh = init_device_mesh("cuda", (WORLD_SIZE // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Transformer().to("cuda")
    outer = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], outer)
    for layer in model.layers:
        inner = {
            "norm": SequenceParallel(),
            "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed.in_proj": ColwiseParallel(),
            "feed.out_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh["tp"], inner)
    sharded = FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True)
    return sharded, lambda: torch.randint(WORDS, (8, TOKENS), device="cuda")


def fsdp2() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """``fully_shard`` of a model on the meta device; the group knows its device, the process does not yet."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    init_process_group(get_default_backend_for_device(device), device_id=device)
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
            module.reset_parameters()
    return model, lambda: torch.randint(WORDS, (32, TOKENS), device=device)


TUTORIALS: dict[str, Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]] = {
    "tensor-parallel": tensor_parallel,
    "sequence-parallel": sequence_parallel,
    "fsdp-tp": fsdp_and_tensor_parallel,
    "fsdp2": fsdp2,
}


def main(name: str) -> None:
    model, batch = TUTORIALS[name]()
    print("DEVICE", torch.cuda.current_device(), flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
    for number in range(10):
        torch.manual_seed(number)
        model(batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
