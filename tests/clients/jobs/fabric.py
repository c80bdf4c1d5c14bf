"""Train with Lightning Fabric: ``fabric.py --strategy fsdp --nodes 8``. Runs on GPUs too, under torchrun."""

from __future__ import annotations

import argparse

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

HIDDEN, LAYERS, VOCABULARY, TOKENS, BATCH = 1024, 4, 8192, 512, 2


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(HIDDEN, 16, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, a unit a block."""
    assert isinstance(model, Model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "fsdp2", "zero2", "zero3"], default="ddp")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--local_rank", type=int, help="what the deepspeed launcher gives to every script")
    options = parser.parse_args()
    strategies = {
        "ddp": lambda: "ddp",
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={Block}),
        "fsdp2": lambda: ModelParallelStrategy(shard, data_parallel_size=8 * options.nodes, tensor_parallel_size=1),
        "zero2": lambda: DeepSpeedStrategy(stage=2, reduce_bucket_size=10_000_000),
        "zero3": lambda: DeepSpeedStrategy(stage=3, reduce_bucket_size=10_000_000),
    }
    fabric = Fabric(
        accelerator="cuda",
        devices=8,
        num_nodes=options.nodes,
        strategy=strategies[options.strategy](),
        precision="bf16-mixed" if options.strategy in ("ddp", "fsdp") else "bf16-true",
    )
    fabric.launch()
    with fabric.init_module(empty_init=options.strategy in ("fsdp2", "zero3")):
        model = Model()
    is_deepspeed = options.strategy.startswith("zero")
    if is_deepspeed:  # it wants both at once, and clips by its own configuration
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-4))
    for step in range(4):
        for micro in range(options.accumulate):
            tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=fabric.device)
            with fabric.no_backward_sync(model, enabled=micro < options.accumulate - 1):
                loss = model(tokens)
                fabric.backward(loss)
        if not is_deepspeed:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step} loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
