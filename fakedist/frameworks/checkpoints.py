"""torch.distributed.checkpoint: what its coordinator makes of all ranks' plans when only one rank runs.

A plan lists the parts of tensors that a rank saves or loads. "Every rank is like me" would give every rank the same
parts. The coordinator would divide them among the faked ranks, and together they would not make up the whole. So the
other ranks' plans are like mine but without parts. The coordinator's answer to this rank then follows from this rank's
own plan, whichever rank it is. A tape could not do better, because the coordinator's run did not have this rank's plan
either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from fakedist.torch_releases import PLAN_OF_ONE_RANK
from fakedist.world.objects import standing_in

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.utils import _DistWrapper

#: Makes one object of all ranks', of any type: torch indexes what it scatters.
Reduce = Callable[[list[object]], Any]


def plans_of_one(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.checkpoint.utils``: wrap the three calls by which ranks agree."""
    wrapper = module._DistWrapper
    reduce_scatter, all_reduce, broadcast = wrapper.reduce_scatter, wrapper.all_reduce, wrapper.broadcast

    def agreed(original: Callable[..., object], is_scattered: bool) -> Callable[..., object]:
        def agree(self: _DistWrapper, step: str, map_fun: Callable[[], object], reduce_fun: Reduce) -> object:
            if not self.use_dist:
                return original(self, step, map_fun, reduce_fun)
            mine: list[object] = []
            failed: dict[int, object] = {}

            def remembered() -> object:
                try:
                    mine.append(map_fun())
                except BaseException as error:
                    failed[self.rank] = module._wrap_exception(error)
                    raise
                return mine[0]

            def reduced(all_data: Sequence[object]) -> object:
                return reduce_fun(_without_others_parts(all_data, self.rank))

            def answer() -> object:
                if not mine:
                    raise module.CheckpointException(step, failed)  # the answer that the coordinator would send
                found = reduce_fun(_without_others_parts(mine * self.get_world_size(), self.rank))
                return found[self.rank] if is_scattered else found

            if self.is_coordinator:
                return original(self, step, map_fun, reduced)
            with standing_in(answer):
                return original(self, step, remembered, reduce_fun)

        return agree

    def told(self: _DistWrapper, step: str, map_fun: Callable[[], object]) -> object:
        if not self.use_dist or self.is_coordinator:
            return broadcast(self, step, map_fun)
        with standing_in(map_fun):
            return broadcast(self, step, map_fun)

    return {
        "_DistWrapper.reduce_scatter": agreed(reduce_scatter, is_scattered=True),
        "_DistWrapper.all_reduce": agreed(all_reduce, is_scattered=False),
        "_DistWrapper.broadcast": told,
    }


def parts_of_one(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.checkpoint.default_planner``: one rank's parts need not make up the whole.

    Torch itself requires it only when there is more than one plan; its other checks stay. A tensor of which this rank
    has no part is still in the checkpoint, because other ranks save it, so the metadata has its name and size.
    """
    validate, create = module._validate_global_plan, module.DefaultSavePlanner.create_global_plan

    def create_global_plan(self: DefaultSavePlanner, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create(self, all_plans)
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and name not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[name] = _without_parts(value)
        return plans, metadata

    def validate_one(global_plan: list[SavePlan], metadata: Metadata) -> object:
        if PLAN_OF_ONE_RANK.is_missing():
            return _parts_fit(module, metadata)
        return validate(global_plan[:1], metadata)

    return {
        "_validate_global_plan": validate_one,
        "DefaultSavePlanner.create_global_plan": create_global_plan,
    }


def _parts_fit(module: ModuleType, metadata: Metadata) -> bool:
    """Torch's own checks but one: every part lies in its tensor, and no two overlap."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for value in metadata.state_dict_metadata.values():
        if not isinstance(value, TensorStorageMetadata):
            continue
        parts = value.chunks
        if not all(module._check_box_bounds(value.size, part) for part in parts):
            return False
        if any(module._check_box_overlap(one, other) for one, other in combinations(parts, 2)):
            return False
    return True


def _without_parts(tensor: torch.Tensor) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    properties = TensorProperties(dtype=tensor.dtype, layout=tensor.layout, requires_grad=tensor.requires_grad)
    return TensorStorageMetadata(properties, tensor.size(), [])


def _without_others_parts(all_data: Sequence[object], rank: int) -> list[object]:
    return [one if place == rank else _without_items(one) for place, one in enumerate(all_data)]


def _without_items(plan: object) -> object:
    """A frozen plan's copy without its items; anything else unchanged."""
    if not hasattr(plan, "items") or not dataclasses.is_dataclass(plan) or isinstance(plan, type):
        return plan
    return dataclasses.replace(plan, items=[])
