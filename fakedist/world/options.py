"""What callers of a process group may pass in options, or in place of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def root(opts: Any) -> int:
    """Group rank of a call's root; 0 by default."""
    return int(getattr(opts, "rootRank", opts or 0))


def reduce_op(opts: Any, op: Any = None) -> Any:
    """A call's reduction; a sum by default."""
    try:
        return opts.reduceOp
    except AttributeError:  # no options, or a bare root or reduction
        pass
    return op if op is not None else opts if opts is not None and not isinstance(opts, int) else dist.ReduceOp.SUM
