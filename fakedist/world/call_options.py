"""What callers of a process group may pass in options, or in place of them.

Each call has a class of options of its own in torch, and C++ callers and torch's operations pass others. So options are
``object`` here, and only these functions look into them.
"""

from __future__ import annotations

from typing import SupportsInt, TypeAlias

import torch.distributed as dist

Reduction: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


def root(opts: object) -> int:
    """Group rank of a call's root; 0 by default."""
    given: int | None = getattr(opts, "rootRank", None)
    if given is not None:
        return given
    return int(opts) if isinstance(opts, SupportsInt) else 0


def reduce_op(opts: object, op: Reduction | None = None) -> Reduction:
    """A call's reduction; a sum by default.

    Raises:
        TypeError: Something else was passed in place of options.
    """
    given: Reduction | None = getattr(opts, "reduceOp", op)
    if given is not None:
        return given
    if opts is None or isinstance(opts, int):  # no options, or a bare root
        return dist.ReduceOp.SUM
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    raise TypeError(f"no reduction: {opts!r}")


def reduction_name(op: object) -> str:
    """Name of a reduction, such as SUM."""
    kind = getattr(op, "op", op)
    return str(getattr(kind, "name", kind))
