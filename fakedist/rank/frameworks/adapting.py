"""Adapts modules that ask all ranks for something one rank cannot answer, when the script imports them.

=======================================  ============================================
module                                   adapter
=======================================  ============================================
``torch.distributed.checkpoint``         :mod:`fakedist.rank.frameworks.checkpoints`
``torch.distributed.pipelining``         :mod:`fakedist.rank.frameworks.pipelining`
``torch._dynamo.trace_rules``            :mod:`fakedist.rank.frameworks.dynamo`
``torch.distributed.algorithms.join``    :mod:`fakedist.rank.frameworks.uneven_inputs`
``torch.nn.parallel.distributed``        :mod:`fakedist.rank.frameworks.uneven_inputs`
``megatron.training.training``           :mod:`fakedist.rank.frameworks.megatron`
``megatron...dist_checkpointing``        :mod:`fakedist.rank.frameworks.megatron`
``megatron_fsdp.uneven_dtensor``         :mod:`fakedist.rank.frameworks.megatron`
``deepspeed.runtime.zero.utils``         :mod:`fakedist.rank.frameworks.deepspeed`
``safetensors.torch``                    :mod:`fakedist.rank.frameworks.safetensors`
``transformer_engine...module.base``     :mod:`fakedist.rank.frameworks.transformer_engine`
=======================================  ============================================

Extras add theirs. On the virtual GPU, :mod:`fakedist.rank.frameworks.sharding` also makes DTensor and FSDP2 answer
sooner.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType

from fakedist import extras
from fakedist.patch import patched, when_imported
from fakedist.rank.frameworks.checkpoints import parts_of_one, parts_of_others, plans_of_one, states_of_others
from fakedist.rank.frameworks.deepspeed import lists_of_rank_0
from fakedist.rank.frameworks.dynamo import nothing_of_ours
from fakedist.rank.frameworks.megatron import flags_of_rank_0, shards_of_one, uneven_parts
from fakedist.rank.frameworks.pipelining import stages_alone
from fakedist.rank.frameworks.safetensors import sparse_safetensors
from fakedist.rank.frameworks.sharding import (
    chunks_when_asked,
    fakes_once,
    first_shard_sizes_once,
    flags_once,
    strategies_once,
)
from fakedist.rank.frameworks.transformer_engine import buffers_of_ranks
from fakedist.rank.frameworks.uneven_inputs import joined_with_others, last_rank_in_common

#: Takes a module; returns what to replace in it, by dotted name.
Adapter = Callable[[ModuleType], dict[str, object]]

#: Adapters by the end of a module's full name, because frameworks carry copies of others.
_ADAPTERS: dict[str, Adapter] = {
    "torch._dynamo.trace_rules": nothing_of_ours,
    "megatron.training.training": flags_of_rank_0,
    "megatron.core.dist_checkpointing.validation": shards_of_one,
    "megatron_fsdp.uneven_dtensor": uneven_parts,
    "torch.distributed.algorithms.join": joined_with_others,
    "torch.nn.parallel.distributed": last_rank_in_common,
    "torch.distributed.checkpoint.utils": plans_of_one,
    "torch.distributed.checkpoint.default_planner": parts_of_one,
    "torch.distributed.optim.zero_redundancy_optimizer": states_of_others,
    "torch.distributed.fsdp._optim_utils": parts_of_others,
    "torch.distributed.pipelining.stage": stages_alone,
    "deepspeed.runtime.zero.utils": lists_of_rank_0,
    "safetensors.torch": sparse_safetensors,
    "transformer_engine.pytorch.module.base": buffers_of_ranks,
}

#: Adapters that only save the host time.
_FASTER: dict[str, Adapter] = {
    "torch.distributed.fsdp._fully_shard._fsdp_param": chunks_when_asked,
    "torch.distributed.tensor._op_schema": fakes_once,
    "torch.distributed.tensor._ops.utils": strategies_once,
    "torch.distributed.tensor._random": first_shard_sizes_once,
    "torch.distributed.tensor._sharding_prop": flags_once,
}


@contextmanager
def adapted_frameworks(*, has_peers: bool = False) -> Iterator[None]:
    """Adapt each framework module when it is imported, and those that already are.

    ``has_peers``: the other ranks run, too.
    """
    adapters = dict(_ADAPTERS)
    for part in extras.parts("adapters"):
        adapters |= part.ADAPTERS if has_peers else part.ADAPTERS | part.ADAPTERS_FOR_ABSENT_RANKS
    with _adapted(adapters):
        yield


@contextmanager
def faster_frameworks() -> Iterator[None]:
    """Speed up DTensor and FSDP2 in the same way; not where the host's time is measured."""
    with _adapted(_FASTER):
        yield


@contextmanager
def _adapted(adapters: Mapping[str, Adapter]) -> Iterator[None]:
    with ExitStack() as stack:

        def adapt(module: ModuleType) -> None:
            adapter = _adapter_of(module.__name__, adapters)
            for name, replacement in adapter(module).items() if adapter is not None else ():
                owner, _, attribute = name.rpartition(".")
                parts = owner.split(".") if owner else []
                stack.enter_context(patched(functools.reduce(getattr, parts, module), attribute, replacement))

        def is_adapted(name: str) -> bool:
            return _adapter_of(name, adapters) is not None

        for module in [module for name, module in sys.modules.items() if is_adapted(name)]:
            adapt(module)
        stack.enter_context(when_imported(is_adapted, adapt))
        yield


def _adapter_of(name: str, adapters: Mapping[str, Adapter]) -> Adapter | None:
    return next((adapter for ending, adapter in adapters.items() if f".{name}".endswith(f".{ending}")), None)
