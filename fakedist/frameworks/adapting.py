"""Adapts modules that ask all ranks for something one rank cannot answer, when the script imports them.

=======================================  ============================================
module                                   adapter
=======================================  ============================================
``torch.distributed.checkpoint``         :mod:`fakedist.frameworks.checkpoints`
``torch.distributed.pipelining``         :mod:`fakedist.frameworks.pipelining`
``torch.distributed._symmetric_memory``  :mod:`fakedist.frameworks.symmetric_memory`
``torch._dynamo.trace_rules``            :mod:`fakedist.frameworks.dynamo`
``megatron_fsdp.uneven_dtensor``         :mod:`fakedist.frameworks.megatron_fsdp`
``deepspeed.runtime.zero.utils``         :mod:`fakedist.frameworks.deepspeed`
``safetensors.torch``                    :mod:`fakedist.frameworks.safetensors`
=======================================  ============================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from fakedist.frameworks.checkpoints import parts_of_one, plans_of_one
from fakedist.frameworks.deepspeed import lists_of_rank_0
from fakedist.frameworks.dynamo import nothing_of_ours
from fakedist.frameworks.megatron_fsdp import uneven_parts
from fakedist.frameworks.pipelining import stages_alone
from fakedist.frameworks.safetensors import sparse_safetensors
from fakedist.frameworks.symmetric_memory import no_symmetric_memory
from fakedist.importing import when_imported
from fakedist.patch import patched

#: Takes a module; returns what to replace in it, by dotted name.
Adapter = Callable[[ModuleType], dict[str, object]]

#: Adapters by the end of a module's full name, because frameworks carry copies of others.
_ADAPTERS: dict[str, Adapter] = {
    "torch._dynamo.trace_rules": nothing_of_ours,
    "megatron_fsdp.uneven_dtensor": uneven_parts,
    "torch.distributed._symmetric_memory": no_symmetric_memory,
    "torch.distributed.checkpoint.utils": plans_of_one,
    "torch.distributed.checkpoint.default_planner": parts_of_one,
    "torch.distributed.pipelining.stage": stages_alone,
    "deepspeed.runtime.zero.utils": lists_of_rank_0,
    "safetensors.torch": sparse_safetensors,
}


@contextmanager
def adapted_frameworks() -> Iterator[None]:
    """Adapt each framework module when it is imported, and those that already are."""
    with ExitStack() as stack:

        def adapt(module: ModuleType) -> None:
            adapter = _adapter_of(module.__name__)
            for name, replacement in adapter(module).items() if adapter is not None else ():
                owner, _, attribute = name.rpartition(".")
                stack.enter_context(patched(getattr(module, owner) if owner else module, attribute, replacement))

        for module in [found for name, found in sys.modules.items() if _is_adapted(name)]:
            adapt(module)
        stack.enter_context(when_imported(_is_adapted, adapt))
        yield


def _adapter_of(name: str) -> Adapter | None:
    return next((adapter for ending, adapter in _ADAPTERS.items() if f".{name}".endswith(f".{ending}")), None)


def _is_adapted(name: str) -> bool:
    return _adapter_of(name) is not None
