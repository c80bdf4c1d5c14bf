"""Adapts frameworks that ask all ranks for something one rank cannot answer, when their modules are imported.

An adapter is one function for one module. It changes what the module must not conclude from "every rank is like me",
and nothing else. If a module lacks the functions that its adapter looks for, it stays unchanged.

==================================  ==================================================================================
module                              why
==================================  ==================================================================================
``megatron_fsdp.uneven_dtensor``    asks all ranks for their parts of a parameter, which differ in size and place, and
                                    fails unless they make up the whole (0.6.1 skips that on torch's fake backend)
``torch.distributed.checkpoint``    :mod:`fakedist.world.checkpoints`
``torch.distributed.pipelining``    :mod:`fakedist.world.pipelines`
``..._symmetric_memory``            writes into other ranks' memory, which does not exist: refused by name
``torch._dynamo.trace_rules``       :mod:`fakedist.world.untraced`
``safetensors.torch``               :mod:`fakedist.world.sparse_files`
``deepspeed.runtime.zero.utils``    ZeRO-3 compares its lists of modules and parameters with rank 0's; the other ranks
                                    receive rank 0's in a buffer of -1, which stays -1 without a tape (0.19.8)
==================================  ==================================================================================
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

from fakedist.errors import WorldError
from fakedist.importing import when_imported
from fakedist.patch import patched
from fakedist.world.checkpoints import parts_of_one, plans_of_one
from fakedist.world.pipelines import gradients_like_outputs
from fakedist.world.sparse_files import sparse_safetensors
from fakedist.world.untraced import nothing_of_ours

Adapter = Callable[[ModuleType], dict[str, Any]]


@contextmanager
def adapted_frameworks() -> Iterator[None]:
    """Adapt each framework module when it is imported, and those that already are."""
    with ExitStack() as stack:

        def adapt(module: ModuleType) -> None:
            for name, replacement in _adapter_of(module.__name__)(module).items():
                owner, _, attribute = name.rpartition(".")
                stack.enter_context(patched(getattr(module, owner) if owner else module, attribute, replacement))

        for module in [found for name, found in sys.modules.items() if _is_adapted(name)]:
            adapt(module)
        stack.enter_context(when_imported(_is_adapted, adapt))
        yield


def _adapter_of(name: str) -> Adapter:
    return next((adapter for ending, adapter in _ADAPTERS.items() if f".{name}".endswith(f".{ending}")), _unchanged)


def _is_adapted(name: str) -> bool:
    return _adapter_of(name) is not _unchanged


def _unchanged(module: ModuleType) -> dict[str, Any]:
    return {}


def _uneven_parts(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Keep a part within its parameter, and ignore that the parts of identical ranks do not make up the whole."""
    replacements: dict[str, Callable[..., Any]] = {}
    if gather := getattr(module, "gather_and_compute_chunk_metadata", None):

        @functools.wraps(gather)
        def within_the_whole(dtensor: Any) -> Any:
            part = gather(dtensor)
            if 0 in part.sizes:
                return part  # a part of missing optimizer state has one dimension, whatever the parameter has
            ends = (whole - size for whole, size in zip(dtensor.shape, part.sizes, strict=True))
            offsets = tuple(max(0, min(place)) for place in zip(part.offsets, ends, strict=True))
            return type(part)(offsets=offsets, sizes=part.sizes)

        replacements["gather_and_compute_chunk_metadata"] = within_the_whole
    if validate := getattr(module, "validate_uneven_dtensor", None):

        @functools.wraps(validate)
        def asked_of_nobody(dtensor: Any) -> None:
            with suppress(AssertionError):
                validate(dtensor)  # the real job makes its calls too

        replacements["validate_uneven_dtensor"] = asked_of_nobody
    return replacements


def _no_symmetric_memory(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Refuse symmetric memory: ranks exchange memory handles in C++, where nothing can answer for a faked rank."""

    def rendezvous(*_: Any, **__: Any) -> Any:
        raise WorldError(
            "symmetric memory (asynchronous tensor parallelism too) writes into other ranks' memory: there is none",
            "turn it off in the script: torch._inductor.config._micro_pipeline_tp = False",
        )

    return {"_SymmetricMemory.rendezvous": rendezvous}


def _lists_of_rank_0(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """If rank 0's list did not arrive, take it to be like mine; a list from a tape is compared as usual."""
    replacements: dict[str, Callable[..., Any]] = {}
    if same_length := getattr(module, "assert_lst_len_same_as_other_ranks", None):

        @functools.wraps(same_length)
        def of_my_length(numbers: list[int]) -> None:
            try:
                same_length(numbers)
            except RuntimeError as error:
                if "rank0: -1 " not in str(error):
                    raise

        replacements["assert_lst_len_same_as_other_ranks"] = of_my_length
    if arrived := getattr(module, "get_lst_from_rank0", None):

        @functools.wraps(arrived)
        def like_mine(numbers: list[int]) -> list[int]:
            found: list[int] = arrived(numbers)
            return list(numbers) if found == [-1] * len(numbers) else found

        replacements["get_lst_from_rank0"] = like_mine
    return replacements


_ADAPTERS: dict[str, Adapter] = {
    "torch._dynamo.trace_rules": nothing_of_ours,
    "megatron_fsdp.uneven_dtensor": _uneven_parts,
    "torch.distributed._symmetric_memory": _no_symmetric_memory,
    "torch.distributed.checkpoint.utils": plans_of_one,
    "torch.distributed.checkpoint.default_planner": parts_of_one,
    "torch.distributed.pipelining.stage": gradients_like_outputs,
    "deepspeed.runtime.zero.utils": _lists_of_rank_0,
    "safetensors.torch": sparse_safetensors,
}
