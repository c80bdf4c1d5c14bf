"""Trains for two steps with each way to compile an optimizer's step, and prints the name of each way.

compiled_optimizers.py KIND    AdamW, whose step breaks graphs, or Descent, whose step does not
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import nn

STEPS = 2


class Descent(torch.optim.Optimizer):
    """An optimizer of the script's own. Nothing in it breaks a graph."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


def train(name: str, model: nn.Module, step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        step()
    print("WAY", name)


def main(kind: str) -> None:
    model = nn.Linear(64, 64).cuda()
    parameters = list(model.parameters())
    optimizer = Descent(parameters) if kind == "Descent" else torch.optim.AdamW(parameters)

    @torch.compile(fullgraph=kind == "Descent")
    def function() -> None:
        optimizer.step()

    train("method", model, torch.compile(optimizer.step))
    train("function", model, function)


main(sys.argv[1])
