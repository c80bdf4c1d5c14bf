"""After PyTorch's introduction to pipeline parallelism: a transformer split by hand, GPipe, one stage a rank.

The tutorial runs one batch on two ranks; this takes as many stages as ranks, and steps an optimizer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


@dataclass
class ModelArgs:
    dim: int = 512
    n_layers: int = 8
    n_heads: int = 8
    vocab_size: int = 10000


class Transformer(nn.Module):
    """Whose parts may be missing."""

    def __init__(self, model_args: ModelArgs) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(model_args.vocab_size, model_args.dim)
        self.layers = nn.ModuleDict()
        for layer_id in range(model_args.n_layers):
            self.layers[str(layer_id)] = nn.TransformerDecoderLayer(model_args.dim, model_args.n_heads)
        self.norm: nn.Module | None = nn.LayerNorm(model_args.dim)
        self.output: nn.Module | None = nn.Linear(model_args.dim, model_args.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, h)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h).clone() if self.output is not None else h


def manual_model_split(
    model: Transformer, num_stages: int, stage_index: int, device: torch.device, example: tuple[torch.Tensor, ...]
) -> PipelineStage:
    """The stage's part of the model."""
    in_a_stage = len(model.layers) // num_stages
    for layer_id in range(len(model.layers)):
        if layer_id // in_a_stage != stage_index:
            del model.layers[str(layer_id)]
    if stage_index > 0:
        model.tok_embeddings = None
    if stage_index < num_stages - 1:
        model.norm = None
        model.output = None
    return PipelineStage(model, stage_index, num_stages, device, input_args=example[:1], output_args=example[1:])


def main() -> None:
    rank, num_stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}")
    torch.cuda.set_device(device)
    dist.init_process_group()
    args, num_microbatches, batch, length = ModelArgs(), 4, 32, 500
    model = Transformer(args)
    tokens = torch.ones(batch, length, dtype=torch.long, device=device)
    labels = torch.randint(0, args.vocab_size, (batch, length), device=device)
    micro = batch // num_microbatches
    hidden = torch.empty(micro, length, args.dim, device=device, requires_grad=True)
    example = (
        torch.ones(micro, length, dtype=torch.long, device=device) if rank == 0 else hidden,
        torch.empty(micro, length, args.vocab_size, device=device) if rank == num_stages - 1 else hidden,
    )
    stage = manual_model_split(model, num_stages, rank, device, example)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def tokenwise_loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.reshape(-1, args.vocab_size), targets.reshape(-1))

    schedule = ScheduleGPipe(stage, n_microbatches=num_microbatches, loss_fn=tokenwise_loss_fn)
    for _ in range(4):
        if rank == 0:
            schedule.step(tokens)
        elif rank == num_stages - 1:
            losses: list[torch.Tensor] = []
            schedule.step(target=labels, losses=losses)
            print(f"losses: {losses}")
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
