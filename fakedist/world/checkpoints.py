"""torch.distributed.checkpoint: what its coordinator makes of all ranks' plans, where one rank has all that there is.

A plan says which parts of which tensors a rank saves or loads. "Every rank is like me" would give all ranks the same
parts: they would be shared out among ranks that do not exist, and would not make up the whole. So the other ranks'
plans are like mine without any part, and what the coordinator answers this rank follows from this rank's own plan,
whichever rank it is; no tape could know better, because the coordinator's run did not have this rank's plan either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from fakedist.world.objects import standing_in

Replacements = dict[str, Callable[..., Any]]


def plans_of_one(module: ModuleType) -> Replacements:
    """For ``torch.distributed.checkpoint.utils``: the three ways in which ranks agree."""
    wrapper = module._DistWrapper
    reduce_scatter, all_reduce, broadcast = wrapper.reduce_scatter, wrapper.all_reduce, wrapper.broadcast

    def agreed(original: Callable[..., Any], is_scattered: bool) -> Callable[..., Any]:
        def agree(self: Any, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], Any]) -> Any:
            if not self.use_dist:
                return original(self, step, map_fun, reduce_fun)
            mine: list[Any] = []
            failed: dict[int, Any] = {}

            def remembered() -> Any:
                try:
                    mine.append(map_fun())
                except BaseException as error:
                    failed[self.rank] = module._wrap_exception(error)
                    raise
                return mine[0]

            def reduced(all_data: Sequence[Any]) -> Any:
                return reduce_fun(_without_others_parts(all_data, self.rank))

            def answer() -> Any:
                if not mine:
                    raise module.CheckpointException(step, failed)  # as the coordinator would answer
                found = reduced(mine * self.get_world_size())
                return found[self.rank] if is_scattered else found

            if self.is_coordinator:
                return original(self, step, map_fun, reduced)
            with standing_in(answer):
                return original(self, step, remembered, reduce_fun)

        return agree

    def told(self: Any, step: str, map_fun: Callable[[], Any]) -> Any:
        if not self.use_dist or self.is_coordinator:
            return broadcast(self, step, map_fun)
        with standing_in(map_fun):
            return broadcast(self, step, map_fun)

    return {
        "_DistWrapper.reduce_scatter": agreed(reduce_scatter, is_scattered=True),
        "_DistWrapper.all_reduce": agreed(all_reduce, is_scattered=False),
        "_DistWrapper.broadcast": told,
    }


def parts_of_one(module: ModuleType) -> Replacements:
    """For ``torch.distributed.checkpoint.default_planner``: one rank's parts need not make up the whole.

    Torch itself asks that of more than one plan alone; its other checks stay. A tensor of which this rank has no part
    is in the checkpoint all the same, because other ranks save it: it is named there with its size.
    """
    validate, create = module._validate_global_plan, module.DefaultSavePlanner.create_global_plan

    def create_global_plan(self: Any, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = create(self, all_plans)
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and name not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[name] = _without_parts(value)
        return plans, metadata

    return {
        "_validate_global_plan": lambda global_plan, metadata: validate(global_plan[:1], metadata),
        "DefaultSavePlanner.create_global_plan": create_global_plan,
    }


def _without_parts(tensor: torch.Tensor) -> Any:
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    properties = TensorProperties(dtype=tensor.dtype, layout=tensor.layout, requires_grad=tensor.requires_grad)
    return TensorStorageMetadata(properties, tensor.size(), [])


def _without_others_parts(all_data: Sequence[Any], rank: int) -> list[Any]:
    return [
        one
        if place == rank or not hasattr(one, "items") or not dataclasses.is_dataclass(one)
        # Not a change of mine: a plan is frozen.
        else dataclasses.replace(one, items=[])  # type: ignore[type-var]
        for place, one in enumerate(all_data)
    ]
