"""Lengths of the rows that norms, softmax, losses and sums reduce."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fakedist.gpu.values.arguments import Arguments, Keywords, tensors
from fakedist.gpu.values.operators import Operator

#: Returns the length of the rows, from a call's arguments and its result.
Length = Callable[[Arguments, Keywords, object], int]

#: These reduce dimension ``dim`` of their first argument.
_ALONG_DIM = {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "logsumexp"} | {
    "cumsum", "topk", "sort",
}  # fmt: skip
#: These pick a class of each row; the argument at this position has the rows.
_OF_CLASSES = {"nll_loss_forward": 0, "nll_loss_backward": 1, "nll_loss2d_forward": 0, "nll_loss2d_backward": 1}
#: These reduce as many values to one as their argument has for each of their result's.
_REDUCE = {"sum", "mean", "amax", "amin", "max", "min", "prod", "var", "var_mean", "std", "std_mean", "norm"} | {
    "linalg_vector_norm", "argmax", "argmin", "any", "all", "nansum", "count_nonzero",
}  # fmt: skip


def length_function(operator: Operator) -> Length | None:
    """The function for an operator; None if it reduces no rows."""
    name = operator.name
    if name in _ALONG_DIM:
        return lambda args, kwargs, result: _along_dim(args, operator.argument("dim", args, kwargs))
    if name in _OF_CLASSES:
        position = _OF_CLASSES[name]
        return lambda args, kwargs, result: _classes(args[position])
    if name in _REDUCE:
        return lambda args, kwargs, result: _reduced(args, result)
    if name.startswith("native_group_norm"):
        return lambda args, kwargs, result: _group(args, operator.argument("group", args, kwargs))
    if "batch_norm" in name:
        return lambda args, kwargs, result: _batch(args)
    if any(argument.name == "normalized_shape" for argument in operator.func._schema.arguments):
        return lambda args, kwargs, result: _normalized(operator.argument("normalized_shape", args, kwargs))
    return None


def _along_dim(args: Arguments, dim: object) -> int:
    first = next(tensors(args), None)
    if first is None or not first.dim():
        return 0
    return int(first.shape[dim if isinstance(dim, int) else -1])


def _classes(rows: object) -> int:
    if not isinstance(rows, torch.Tensor) or not rows.dim():
        return 0
    return int(rows.shape[1 if rows.dim() > 1 else 0])


def _reduced(args: Arguments, result: object) -> int:
    before = next(tensors(args), None)
    after = next(tensors((result,)), None)
    if before is None or after is None or not after.numel():
        return 0
    return int(before.numel()) // int(after.numel())


def _group(args: Arguments, groups: object) -> int:
    first = next(tensors(args), None)
    if first is None or not isinstance(groups, int) or not first.dim() or not first.shape[0]:
        return 0
    return int(first.numel()) // (int(first.shape[0]) * max(groups, 1))


def _batch(args: Arguments) -> int:
    first = next(tensors(args), None)
    return int(first.numel()) // max(int(first.shape[1]), 1) if first is not None and first.dim() > 1 else 0


def _normalized(shape: object) -> int:
    return math.prod(int(size) for size in shape) if isinstance(shape, (list, tuple)) else 0
