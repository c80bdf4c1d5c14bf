"""Finds optimizers that exist and have not stepped yet."""

from __future__ import annotations

from collections.abc import Container

import torch

from fakedist.record.alive import alive


def any_waits(stepped: Container[int]) -> bool:
    """Whether an optimizer that has not stepped has parameters that no optimizer that stepped has.

    An optimizer that shares its parameters with another wraps it, or is wrapped by it. This searches all Python
    objects, once or twice a run, because no torch hook reports the creation of every class of optimizer.

    Args:
        stepped: The ``id`` of each optimizer that stepped.
    """
    found = [each for each in alive(_is_optimizer) if isinstance(each, torch.optim.Optimizer)]
    known = {id(parameter) for each in found if id(each) in stepped for parameter in _parameters(each)}
    waiting = [each for each in found if id(each) not in stepped]
    return any(id(parameter) not in known for each in waiting for parameter in _parameters(each))


def _is_optimizer(of: type) -> bool:
    return issubclass(of, torch.optim.Optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", None) or []
    return [parameter for group in groups for parameter in group.get("params", ()) if parameter.requires_grad]
