"""Checkpoints of one rank: plans of torch.distributed.checkpoint, and optimizer states that only other ranks hold.

The coordinator of torch.distributed.checkpoint merges all ranks' plans, which list the parts of tensors that each rank
saves or loads. If every rank had the same parts, it would divide them among the faked ranks, and they would not make up
the whole. So the other ranks' plans are like mine without parts. The answer to this rank then follows from its own
plan, whichever rank it is. A tape could not do better: the coordinator's run did not have this rank's plan either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pickle import UnpicklingError
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fakedist.errors import WorldError
from fakedist.units import format_rank_list
from fakedist.world.objects import standing_in

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.utils import _DistWrapper
    from torch.distributed.optim import ZeroRedundancyOptimizer

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

    def coordinated(self: _DistWrapper, step: str, map_fun: Callable[[], object]) -> object:
        if not self.use_dist or self.is_coordinator:
            return broadcast(self, step, map_fun)
        with standing_in(map_fun):
            return broadcast(self, step, map_fun)

    return {
        "_DistWrapper.reduce_scatter": agreed(reduce_scatter, is_scattered=True),
        "_DistWrapper.all_reduce": agreed(all_reduce, is_scattered=False),
        "_DistWrapper.broadcast": coordinated,
    }


def parts_of_one(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.checkpoint.default_planner``: one rank's parts need not make up the whole.

    Torch itself requires it only for several plans; its other checks stay. The metadata still names a tensor of which
    this rank has no part, with its size, because other ranks save it.
    """
    validate = module._validate_global_plan
    create = module.DefaultSavePlanner.create_global_plan

    def create_global_plan(self: DefaultSavePlanner, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create(self, all_plans)
        for name, value in self.state_dict.items():
            if isinstance(value, torch.Tensor) and name not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[name] = _without_parts(value)
        return plans, metadata

    return {
        "_validate_global_plan": lambda global_plan, metadata: validate(global_plan[:1], metadata),
        "DefaultSavePlanner.create_global_plan": create_global_plan,
    }


def _without_parts(tensor: torch.Tensor) -> TensorStorageMetadata:
    from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

    properties = TensorProperties(dtype=tensor.dtype, layout=tensor.layout, requires_grad=tensor.requires_grad)
    return TensorStorageMetadata(properties, tensor.size(), [])


def _without_others_parts(all_data: Sequence[object], rank: int) -> list[object]:
    return [one if place == rank else _without_items(one) for place, one in enumerate(all_data)]


def _without_items(plan: object) -> object:
    if not hasattr(plan, "items") or not dataclasses.is_dataclass(plan) or isinstance(plan, type):
        return plan
    return dataclasses.replace(plan, items=[])


def states_of_others(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.optim.zero_redundancy_optimizer``: name the ranks whose states a rank consolidates.

    A rank that does not consolidate them discards what the others send.
    """
    optimizer, receive = module.ZeroRedundancyOptimizer, module._broadcast_object
    consolidate = optimizer.consolidate_state_dict
    targets: list[bool] = []

    def consolidate_state_dict(self: ZeroRedundancyOptimizer, to: int = 0) -> None:
        targets.append(self.rank == to)
        try:
            consolidate(self, to)
        finally:
            targets.pop()

    def broadcast_object(obj: object, src_rank: int, group: Any = None, device: Any = "cpu") -> object:
        try:
            return receive(obj, src_rank, group, device)
        except (EOFError, RuntimeError, UnpicklingError):
            if not targets or dist.get_rank() == src_rank:
                raise
            if targets[-1]:
                raise _lacks_states("ZeroRedundancyOptimizer.consolidate_state_dict", group) from None
            return obj

    return {
        "ZeroRedundancyOptimizer.consolidate_state_dict": consolidate_state_dict,
        "_broadcast_object": broadcast_object,
    }


def parts_of_others(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.fsdp._optim_utils``: name the ranks that hold the rest of FSDP1's original parameters."""
    state_dict = module._optim_state_dict

    @functools.wraps(state_dict)
    def optim_state_dict(*args: object, **kwargs: Any) -> object:
        try:
            return state_dict(*args, **kwargs)
        except (AssertionError, KeyError, RuntimeError):
            if not kwargs.get("use_orig_params") or dist.get_world_size(kwargs.get("group")) == 1:
                raise
            raise _lacks_states("FSDP's optimizer state dict with use_orig_params", kwargs.get("group")) from None

    return {"_optim_state_dict": optim_state_dict}


def _lacks_states(call: str, group: dist.ProcessGroup | None) -> WorldError:
    rank = dist.get_rank()
    others = format_rank_list([each for each in dist.get_process_group_ranks(group) if each != rank])
    return WorldError(
        f"{call} needs the optimizer states that ranks {others} hold",
        f"record the steps before it: --steps 2; or, if a rank's states take 1 MiB at most, run those ranks "
        f"first: --rank {others},{rank}",
    )
