"""DTensor and FSDP2: the same answers about shards, without Python's work for each of thousands of ranks.

For each parameter, torch goes through every rank of the mesh, or through every other parameter. Nothing here allocates
on the device, so memory stays the same. The host needs less time for the first step, so a rank on a real GPU, whose
steps are measured, keeps torch's own functions.

A replacement calls the original and keeps its answer, or gives it less to go through. Only FSDP2's list of chunks is
our own: it makes each chunk on demand. A torch without one of these functions runs without its replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, overload

from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

_PLAIN = (Tensor, nn.Parameter)
#: Tensors in a long list.
_MANY = 8


def first_shard_sizes_once(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.tensor._random``, which asks for the first shard's size before each random operation.

    If FSDP2 and tensor parallelism shard the same dim, torch cuts a list of indices for every rank.
    """
    name = "_calc_first_shard_size"
    if not hasattr(module, name):
        return {}
    original: Callable[[DTensorSpec], list[int]] = getattr(module, name)
    known: dict[Hashable, list[int]] = {}

    def first_shard_size(spec: DTensorSpec) -> list[int]:
        shape = tuple(spec.shape)
        if _get_current_dispatch_mode_stack() or not all(type(size) is int for size in shape):
            return original(spec)  # traced: its operations are seen, or sizes are symbols
        placements = tuple((type(placement), placement) for placement in spec.placements)
        key = (shape, placements, tuple(spec.mesh.shape))
        if key not in known:
            known[key] = original(spec)
        return list(known[key])

    return {name: first_shard_size}


def chunks_when_asked(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.fsdp._fully_shard._fsdp_param``, which reads two of as many chunks as there are ranks."""
    name = "_chunk_with_empty"
    if not hasattr(module, name):
        return {}
    original: Callable[..., list[Tensor]] = getattr(module, name)

    def chunk_with_empty(tensor: Tensor, num_chunks: int, dim: int) -> Sequence[Tensor]:
        if type(tensor) not in _PLAIN or not tensor.numel():
            return original(tensor, num_chunks, dim=dim)
        return Chunks(tensor, num_chunks, dim)

    return {name: chunk_with_empty}


class Chunks(Sequence[Tensor]):
    """The views that ``torch.chunk`` gives along ``dim``, then empty tensors up to ``num_chunks``, made on demand."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._num_chunks, self._dim = tensor, num_chunks, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __len__(self) -> int:
        return self._num_chunks

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        """Make a new view, or an empty tensor of one dim, as FSDP2 appends them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        start = range(self._num_chunks)[index] * self._size
        left = self._tensor.size(self._dim) - start
        if left <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, left))


@dataclass(frozen=True)
class _Specs:
    """The part of an ``OpSchema`` that torch reads the flag from."""

    args_spec: tuple[DTensorSpec, ...]


@dataclass
class _Propagation:
    """The facts known while the shardings of one operation are worked out; ``kept`` keeps each ``id`` unique."""

    strategies: dict[Hashable, OpStrategy] = field(default_factory=dict)
    flags: dict[int, _Specs] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)


_propagation: ContextVar[_Propagation | None] = ContextVar("the operation whose shardings are worked out", default=None)

#: Fake tensors of the operation whose arguments are made, by shape.
_fakes: ContextVar[dict[Hashable, object] | None] = ContextVar("fake tensors that are made once", default=None)


def flags_once(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.tensor._sharding_prop``: operations on lists of tensors, such as a fused optimizer's.

    For each tensor of the list, torch reads a flag from all of them. Older releases have no such flag.
    """
    name, propagate_name = "_propagate_use_strided_shard_flag", "propagate_op_sharding_non_cached"
    if not hasattr(module, name) or not hasattr(module.ShardingPropagator, propagate_name):
        return {}
    original: Callable[[OpStrategy, OpSchema | _Specs], None] = getattr(module, name)
    propagate: Callable[[ShardingPropagator, OpSchema], object] = getattr(module.ShardingPropagator, propagate_name)

    def remembering(self: ShardingPropagator, op_schema: OpSchema) -> object:
        token = _propagation.set(_Propagation())
        try:
            return propagate(self, op_schema)
        finally:
            _propagation.reset(token)

    def set_flag(op_strategy: OpStrategy, op_schema: OpSchema) -> None:
        now = _propagation.get()
        if now is None:
            return original(op_strategy, op_schema)
        if id(op_schema) not in now.flags:
            now.kept.append(op_schema)
            now.flags[id(op_schema)] = _Specs(_telling(op_schema.args_spec, module._StridedShard))
        return original(op_strategy, now.flags[id(op_schema)])

    return {name: set_flag, f"ShardingPropagator.{propagate_name}": remembering}


def _telling(specs: Sequence[DTensorSpec], strided_shard: type) -> tuple[DTensorSpec, ...]:
    """The specs that determine the flag: torch combines them in order, and equal neighbours add nothing."""
    strided = [spec for spec in specs if any(isinstance(each, strided_shard) for each in spec.placements)]
    return tuple(next(equal) for _, equal in groupby(strided, lambda spec: spec.use_strided_shard_as_shard_order))


def strategies_once(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.tensor._ops.utils``: strategies of an operation on many tensors that are alike.

    Torch looks up one schema for all of them, then makes each one's strategy from it.
    """
    name = "expand_to_full_mesh_op_strategy"
    if not hasattr(module, name):
        return {}
    original: Callable[..., OpStrategy] = getattr(module, name)

    def expand(mesh: object, op_schema: OpSchema, strategies: list[list[object]], **options: object) -> OpStrategy:
        now = _propagation.get()
        if now is None or options.get("full_mesh_strategy_filter") is not None:
            return original(mesh, op_schema, strategies, **options)
        by_value = tuple(
            (key, tuple(value) if isinstance(value, list) else id(value)) for key, value in options.items()
        )
        key = (id(mesh), id(op_schema), tuple(map(tuple, strategies)), by_value)
        if key not in now.strategies:
            now.kept.append((mesh, op_schema, options))
            now.strategies[key] = original(mesh, op_schema, strategies, **options)
        return now.strategies[key]

    return {name: expand}


def fakes_once(module: ModuleType) -> dict[str, object]:
    """For ``torch.distributed.tensor._op_schema``: the fake tensors with which an operation infers its shapes.

    Torch makes one for each tensor. Those of a long list that are alike become one, passed several times.
    """
    name, make_all_name = "_rebuild_tensor_from_dtensor_meta", "gen_fake_args"
    if not hasattr(module, name) or not hasattr(module.OpSchema, make_all_name):
        return {}
    make: Callable[[DTensorSpec], object] = getattr(module, name)
    make_all: Callable[[OpSchema], object] = getattr(module.OpSchema, make_all_name)

    def make_once(spec: DTensorSpec) -> object:
        made = _fakes.get()
        meta = spec.tensor_meta
        if made is None or meta is None or not all(type(size) is int for size in (*meta.shape, *meta.stride)):
            return make(spec)
        key = (meta, spec.mesh.device_type)
        if key not in made:
            made[key] = make(spec)
        return made[key]

    def make_all_once(self: OpSchema) -> object:
        if not any(isinstance(each, (list, tuple)) and len(each) >= _MANY for each in self.args_schema):
            return make_all(self)
        token = _fakes.set({})
        try:
            return make_all(self)
        finally:
            _fakes.reset(token)

    return {name: make_once, f"OpSchema.{make_all_name}": make_all_once}
