"""What callers of a process group may give in options, or instead of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def root(opts: Any) -> int:
    """The rank of a call's root: 0 if it is not said."""
    return int(getattr(opts, "rootRank", opts or 0))


def reduce_op(opts: Any, op: Any = None) -> Any:
    """A call's reduction: a sum if it is not said."""
    try:
        return opts.reduceOp
    except AttributeError:  # no options, or a bare root or reduction
        pass
    return op if op is not None else opts if opts is not None and not isinstance(opts, int) else dist.ReduceOp.SUM
