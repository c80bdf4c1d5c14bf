"""Transformer Engine: attributes of its modules, and memory that it allocates outside the dispatcher."""

from __future__ import annotations

#: A dict on a module: copies of its parameters in eight bits, which serve all microbatches.
COPIES = "_fp8_workspaces"
#: Functions that allocate a cuBLAS workspace for matrix products.
WORKSPACE_FUNCTIONS = {"get_cublas_workspace", "get_workspace"}
