"""Transformer Engine: attributes of its modules, and memory that it allocates outside the dispatcher."""

from __future__ import annotations

from types import ModuleType

from fakedist.world.symmetric import buffer_of_ranks, helper_of_ranks

#: A dict on a module: copies of its parameters in eight bits, which serve all microbatches.
COPIES = "_fp8_workspaces"
#: Functions that allocate a cuBLAS workspace for matrix products.
WORKSPACE_FUNCTIONS = {"get_cublas_workspace", "get_workspace"}


def buffers_of_ranks(module: ModuleType) -> dict[str, object]:
    """For ``transformer_engine.pytorch.module.base``: user buffers, which the ranks of a domain exchange.

    They are classes of its extension, which is loaded past Python's imports.
    """
    extension = getattr(module, "tex", None)
    made = {"CommOverlapHelper": helper_of_ranks, "CommOverlap": buffer_of_ranks, "CommOverlapP2P": buffer_of_ranks}
    present = {name: getattr(extension, name) for name in made if hasattr(extension, name)}
    return {f"tex.{name}.__init__": made[name](kind.__init__) for name, kind in present.items()}
