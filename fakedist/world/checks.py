"""The errors that torch's backends raise before they send anything, checked on this rank's own arguments.

Each call has a class of options of its own in torch, and C++ callers and torch's operations pass others. So options are
``object`` here, and only these functions look into them.

Texts and types are those of ProcessGroupNCCL.cpp and ProcessGroupGloo.cpp in torch/csrc/distributed/c10d. Where the two
differ, a group raises its own backend's error, except for ``reduce_scatter`` of one tensor (always NCCL's). What no
backend checks (another rank's sizes) is not checked here either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, SupportsInt, TypeAlias, TypeGuard

import torch
import torch.distributed as dist

Reduction: TypeAlias = "dist.ReduceOp | dist.ReduceOp.RedOpType"


def root(opts: object) -> int:
    """Group rank of a call's root; 0 by default."""
    rank: int | None = getattr(opts, "rootRank", None)
    if rank is not None:
        return rank
    return int(opts) if isinstance(opts, SupportsInt) else 0


def reduce_op(opts: object, op: Reduction | None = None) -> Reduction:
    """A call's reduction; a sum by default. TypeError if something else was passed in place of options."""
    reduction: Reduction | None = getattr(opts, "reduceOp", op)
    if reduction is not None:
        return reduction
    if opts is None or isinstance(opts, int):  # no options, or a bare root
        return dist.ReduceOp.SUM
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return opts
    raise TypeError(f"no reduction: {opts!r}")


def reduction_name(op: object) -> str:
    """Name of a reduction, such as SUM."""
    kind = getattr(op, "op", op)
    return str(getattr(kind, "name", kind))


Tensors = Sequence[torch.Tensor]
#: A list of tensors, or lists of tensors with one list for each input.
Lists = Sequence[torch.Tensor] | Sequence[Tensors]


def listed(tensors: torch.Tensor | Tensors) -> list[torch.Tensor]:
    """A tensor or several as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def only_list(tensors: Lists) -> list[torch.Tensor]:
    """A call's list of tensors, which C++ callers pass as the only one of a list of lists."""
    return list(tensors if not tensors or _are_tensors(tensors) else tensors[0])


def _are_tensors(tensors: Lists) -> TypeGuard[Tensors]:
    return isinstance(tensors[0], torch.Tensor)


def is_even(tensors: Tensors) -> bool:
    """Return whether ProcessGroupNCCL makes a flat buffer for device tensors (check_same_size, newLikeFlat)."""
    shape = tensors[0].shape
    return tensors[0].is_cuda and all(tensor.shape == shape for tensor in tensors)


def flat_like(tensors: Tensors) -> torch.Tensor:
    """An uninitialised flat buffer for tensors of equal shapes."""
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))


class Exchanged(NamedTuple):
    """Bytes of an all_to_all to other ranks or from them, whichever direction has more: the largest part, and all."""

    largest_part: int = 0
    total: int = 0

    def most(self, other: Exchanged) -> Exchanged:
        """The larger of each of two directions."""
        return Exchanged(max(self.largest_part, other.largest_part), max(self.total, other.total))


def exchanged(parts: Sequence[int], index: int, unit: int = 1) -> Exchanged:
    """The parts of an all_to_all in one direction, without the one at this rank's index. ``unit`` is bytes per size."""
    sizes = [int(size) * unit for other, size in enumerate(parts) if other != index]
    return Exchanged(max(sizes, default=0), sum(sizes))


#: Reductions that some backend lacks for some type, by their hash, which is their group.
ODD_OPS = frozenset(map(hash, (dist.ReduceOp.AVG, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)))


class CheckedGroup(NamedTuple):
    """The backend that serves the tensors ("nccl", "gloo"), whose errors a check raises, and the size of the group."""

    backend: str
    num_ranks: int

    @property
    def is_nccl(self) -> bool:
        """Return whether the backend is NCCL."""
        return self.backend == "nccl"

    def named(self, operation: str) -> str:
        """The operation as the backend names it."""
        return f"ProcessGroup{'NCCL' if self.is_nccl else self.backend.capitalize()}::{operation}: "


def check_device(by_device: dict[str, str], device: torch.device) -> None:
    """Raise RuntimeError if the group has no backend for a device, as ``ProcessGroup::getBackend`` does."""
    if device.type not in by_device and device.type in ("cpu", "cuda"):
        raise RuntimeError(f"No backend type associated with device type {device.type}")


def check_dense(*lists: Tensors) -> None:
    """NCCL's ``check_gpu_single_tensor``: ValueError if a list's only tensor is sparse or not contiguous.

    Longer lists pass, because NCCL copies them to and from its own buffer.
    """
    for tensors in lists:
        if len(tensors) != 1 or (tensors[0].layout is torch.strided and _is_packed(tensors[0])):
            continue
        if tensors[0].layout is not torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        raise ValueError("Tensors must be contiguous")


def check_root(group: CheckedGroup, operation: str, root: int) -> None:
    """Raise RuntimeError if the group has no such rank, as ``assertRootRank`` does."""
    if not 0 <= root < group.num_ranks:
        raise RuntimeError(f"{group.named(operation)}invalid root rank: {root}")


def check_op(group: CheckedGroup, op: object, dtype: torch.dtype) -> None:
    """Check one of ``ODD_OPS``, as ``getNcclReduceOp`` and gloo's equivalent do.

    Bitwise: ValueError on NCCL, RuntimeError for non-integral types elsewhere. A mean of booleans: TypeError on NCCL.
    """
    name = reduction_name(op)
    if group.is_nccl and name == "AVG":
        if dtype == torch.bool:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    elif group.is_nccl:
        raise ValueError(f"Cannot use ReduceOp.{name} with NCCL")
    elif name != "AVG" and (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"Cannot use ReduceOp.{name} with non-integral dtype")


def check_peer(num_ranks: int, peer: int) -> None:
    """Raise DistStoreError for a rank outside the group; the real job waits for it until a timeout."""
    if peer >= num_ranks:
        raise dist.DistStoreError(f"wait timeout: the group has no rank {peer}, only ranks 0 to {num_ranks - 1}")


def check_gathered(group: CheckedGroup, slots: Tensors, mine: torch.Tensor) -> None:
    """Raise RuntimeError for a list of ``all_gather`` of wrong length, on gloo also of another type or size."""
    if len(slots) != group.num_ranks:
        raise RuntimeError(
            f"{group.named('allgather')}invalid output tensor list at index 0 "
            f"(expected length {group.num_ranks}, got {len(slots)})"
        )
    if group.backend == "gloo":
        _match(group, "allgather", slots, mine)


def check_gathered_into(group: CheckedGroup, output: torch.Tensor, mine: torch.Tensor) -> None:
    """TypeError for an output of another type, ValueError for one of the wrong size; on gloo, RuntimeError for both."""
    if output.dtype == mine.dtype and output.numel() == mine.numel() * group.num_ranks:
        return
    if group.backend == "gloo":
        _match(group, "allgather", output.reshape(-1).chunk(group.num_ranks), mine.reshape(-1))
    if output.dtype != mine.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    raise ValueError("output tensor size must be equal to world_size times input tensor size")


def check_slots(group: CheckedGroup, operation: str, tensors: Tensors, mine: torch.Tensor) -> None:
    """Raise RuntimeError for a list of ``gather`` or ``scatter`` on its root of wrong length, type or size."""
    if len(tensors) != group.num_ranks:
        which = "input" if operation == "scatter" else "output"
        raise RuntimeError(
            f"{group.named(operation)}Incorrect {which} list size {len(tensors)}. "
            f"{which.capitalize()} list size should be {group.num_ranks}, same as size of the process group."
        )
    _match(group, operation, tensors, mine)


def check_scattered(group: CheckedGroup, output: torch.Tensor, chunks: Tensors, index: int) -> None:
    """Raise RuntimeError for a list of ``reduce_scatter`` of wrong length, and the errors of its tensors."""
    if len(chunks) != group.num_ranks:
        raise RuntimeError("invalid input tensor list size, must be world size")
    check_scattered_from(CheckedGroup(group.backend, 1), output, chunks[index])


def check_scattered_from(group: CheckedGroup, output: torch.Tensor, source: torch.Tensor) -> None:
    """TypeError if the types differ, ValueError if the input does not have the size of all parts together."""
    if source.dtype != output.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if group.num_ranks > 1 and source.numel() != output.numel() * group.num_ranks:
        raise ValueError("input tensor must be the same size as output size times world size")


def check_splits(group: CheckedGroup, tensor: torch.Tensor, sizes: Sequence[int]) -> None:
    """Check as ``checkSplitSizes`` (c10d/Utils.hpp): RuntimeError unless one size per rank, adding up to the rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not len(sizes):
        if rows % group.num_ranks:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        return
    if len(sizes) != group.num_ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if int(sum(sizes)) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def check_lists(group: CheckedGroup, inputs: Tensors, outputs: Tensors) -> None:
    """Raise RuntimeError for a list of ``all_to_all`` with too few or too many tensors."""
    for name, tensors in (("input", inputs), ("output", outputs)):
        if len(tensors) != group.num_ranks:
            raise RuntimeError(
                f"{group.named('alltoall')}{name} tensor list size {len(tensors)} "
                f"does not match world size {group.num_ranks}"
            )


def _match(group: CheckedGroup, operation: str, tensors: Tensors, like: torch.Tensor) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.dtype != like.dtype:
            mismatch = ("type", _name(like.dtype), _name(tensor.dtype))
        elif tensor.shape != like.shape:
            mismatch = ("size", _sizes(like), _sizes(tensor))
        else:
            continue
        mismatched, expected, got = mismatch
        raise RuntimeError(
            f"{group.named(operation)}invalid tensor {mismatched} at index {index} (expected {expected}, got {got})"
        )


def _is_packed(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return channels_last is not None and tensor.is_contiguous(memory_format=channels_last)


def _sizes(tensor: torch.Tensor) -> str:
    return f"({', '.join(str(size) for size in tensor.shape)})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
