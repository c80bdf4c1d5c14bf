"""Optimizers that exist and have not stepped yet."""

from __future__ import annotations

import gc
from collections.abc import Container

import torch


def any_waits(stepped: Container[int]) -> bool:
    """Whether an optimizer has parameters that none of those that stepped has.

    One that shares its parameters wraps another one, or is wrapped. Found among all objects of Python, once or twice a
    run: optimizers are made by classes that no hook of torch's tells of.

    Args:
        stepped: The ``id`` of each optimizer that stepped.
    """
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    known = {id(parameter) for each in found if id(each) in stepped for parameter in _parameters(each)}
    waiting = [each for each in found if id(each) not in stepped]
    return any(id(parameter) not in known for each in waiting for parameter in _parameters(each))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", None) or []
    return [parameter for group in groups for parameter in group.get("params", ()) if parameter.requires_grad]
