"""A model with every kind of copy of its parameters that never runs, and a momentum that is none."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 1024), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


class Shadow:
    """As diffusers' EMAModel keeps its average."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [parameter.clone().detach() for parameter in model.parameters()]


def main() -> None:
    model = nn.Sequential(Block(), Block()).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    ema = copy.deepcopy(model).requires_grad_(False)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    shadow_of_unet = Shadow(model)
    best = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = [torch.zeros_like(parameter) for parameter in model.parameters()]
    while True:
        model(torch.randn(8, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.01)
        averaged.update_parameters(model)
        best = {name: best[name].lerp(value, 0.01) for name, value in model.state_dict().items()}
        assert len(momentum) == len(shadow_of_unet.shadow_params)


main()
