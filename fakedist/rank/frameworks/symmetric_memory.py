"""torch.distributed's symmetric memory: refused, because it writes into other ranks' memory."""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

from fakedist.errors import WorldError


def no_symmetric_memory(module: ModuleType) -> dict[str, object]:
    """Refuse to exchange memory handles: ranks do it in C++, where nothing can answer for a faked rank."""

    def rendezvous(*_: object, **__: object) -> NoReturn:
        raise WorldError(
            "symmetric memory (which asynchronous tensor parallelism uses) writes into other ranks' memory, "
            "which does not exist here",
            "turn it off in the script: torch._inductor.config._micro_pipeline_tp = False",
        )

    return {"_SymmetricMemory.rendezvous": rendezvous}
