"""DTensor and FSDP2 that answer sooner: each answer is the one that torch gives itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor, Replicate, Shard, _random, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

from fakedist.rank.frameworks.adapting import faster_frameworks
from fakedist.rank.frameworks.sharding import chunks_when_asked, first_shard_sizes_once, flags_once, strategies_once
from fakedist.torch_releases import installed

Enter = Callable[..., None]
Schema = Any  # torch's own
needs_flag = pytest.mark.skipif(
    not hasattr(_sharding_prop, "_propagate_use_strided_shard_flag"), reason="this torch has no such flag"
)
needs_first_size = pytest.mark.skipif(
    not hasattr(_random, "_calc_first_shard_size"), reason="this torch does not ask for the first shard's size"
)


@contextmanager
def counted(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The number of calls of torch's own function."""
    calls: Counter[str] = Counter()
    original = getattr(owner, name)

    def counting(*args: object, **kwargs: object) -> object:
        calls[name] += 1
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, counting)
        yield calls


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 7, 8, 64])
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_are_those_of_torch(num_chunks: int, dim: int) -> None:
    tensor = torch.arange(7 * 5).reshape(7, 5)
    theirs = _fsdp_param._chunk_with_empty(tensor, num_chunks, dim=dim)
    with faster_frameworks():
        ours = _fsdp_param._chunk_with_empty(tensor, num_chunks, dim=dim)
    assert len(ours) == len(theirs)
    assert type(ours) is not type(theirs)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)
        assert (mine.stride(), mine.dtype) == (its.stride(), its.dtype)
        assert mine.storage_offset() == its.storage_offset()
    assert torch.equal(ours[-1], theirs[-1])
    with pytest.raises(IndexError):
        ours[num_chunks]


def test_chunks_of_no_elements_or_of_a_subclass_are_torchs() -> None:
    class Other(torch.Tensor):
        pass

    with faster_frameworks():
        assert type(_fsdp_param._chunk_with_empty(torch.ones(0, 2), 4, dim=0)) is list
        assert type(_fsdp_param._chunk_with_empty(torch.ones(4).as_subclass(Other), 4, dim=0)) is list


@needs_first_size
def test_the_first_shards_size_is_torchs_and_is_worked_out_once(
    enter_world: Enter, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_world(16, 3)
    mesh = init_device_mesh("cpu", (8, 2))
    placements = [
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Shard(0)),
        (Shard(1), Replicate()),
        (_StridedShard(1, split_factor=2), Shard(1)),
    ]
    shapes = [(32, 16), (20, 7), (3, 3)]
    specs = [DTensorSpec(mesh, each, meta(shape)) for each in placements for shape in shapes]
    theirs = [_random._calc_first_shard_size(spec) for spec in specs]
    with counted(_random, "_calc_first_shard_size", monkeypatch) as calls, faster_frameworks():
        for _ in range(2):
            found = [_random._calc_first_shard_size(spec) for spec in specs]
            assert found == theirs
            found[0].clear()
    assert calls["_calc_first_shard_size"] == len(specs)


def meta(shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    return TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)


def operations_on_lists(monkeypatch: pytest.MonkeyPatch) -> list[Schema]:
    """The schemas of operations on the parameters of a model with both kinds of shards."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(nn.Linear(16, 16, bias=each != 1) for each in range(3)), nn.Linear(16, 48))
    for name, parameter in list(model.named_parameters()):
        path, _, attribute = name.rpartition(".")
        part = model.get_submodule(path)
        shards = [Shard(parameter.ndim - 1)] if name.startswith("1") else [Shard(0)]
        setattr(part, attribute, nn.Parameter(DTensor.from_local(parameter.data, mesh["tp"], shards, run_check=False)))
    fully_shard(model, mesh=mesh["dp"])
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    schemas: list[Schema] = []
    propagate = _sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached

    def keeping(self: object, schema: Schema) -> object:
        schemas.append(schema)
        return propagate(self, schema)

    with monkeypatch.context() as patch:
        patch.setattr(_sharding_prop.ShardingPropagator, "propagate_op_sharding_non_cached", keeping)
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        torch.optim.AdamW(parameters, fused=True).step()
        torch.optim.AdamW(parameters, foreach=True).step()
    return [schema for schema in schemas if any(isinstance(each, (list, tuple)) for each in schema.args_schema)]


@needs_flag
def test_shardings_of_operations_on_lists_are_torchs(enter_world: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_world(8, 3)
    schemas = operations_on_lists(monkeypatch)
    assert {"_foreach_norm", "_fused_adamw_"} <= {schema.op.name().split("::")[1].split(".")[0] for schema in schemas}
    placements = {type(each) for schema in schemas for spec in schema.args_spec for each in spec.placements}
    assert {_StridedShard, Shard} <= placements
    propagator = DTensor._op_dispatcher.sharding_propagator
    theirs = [propagator.propagate_op_sharding_non_cached(schema) for schema in schemas]
    with counted(utils, "expand_to_full_mesh_op_strategy", monkeypatch) as before:
        propagator.propagate_op_sharding_non_cached(schemas[0])
    with counted(utils, "expand_to_full_mesh_op_strategy", monkeypatch) as calls, faster_frameworks():
        ours = [propagator.propagate_op_sharding_non_cached(schema) for schema in schemas]
        calls.clear()
        propagator.propagate_op_sharding_non_cached(schemas[0])
    assert [str(each) for each in ours] == [str(each) for each in theirs]
    assert [each.output_spec for each in ours] == [each.output_spec for each in theirs]
    assert [flags(each) for each in ours] == [flags(each) for each in theirs]
    assert calls.total() < before.total() or installed() < (2, 14)  # older ones make these strategies elsewhere


def flags(sharding: Any) -> list[tuple[object, object]]:
    """The flag, and the order of the shards, of each spec that an operation is given."""
    schema = sharding.redistribute_schema
    specs = [sharding.output_spec, *(() if schema is None else schema.args_spec)]
    flat = [
        each for spec in specs for each in (spec if isinstance(spec, (list, tuple)) else [spec]) if each is not None
    ]
    return [(each.use_strided_shard_as_shard_order, each.shard_order) for each in flat]


@needs_flag
@pytest.mark.parametrize("told", [[True], [False], [True, True, False], [False, True, True], [False, False], []])
def test_a_flag_of_many_specs_is_torchs(enter_world: Enter, told: list[bool]) -> None:
    enter_world(8, 3)
    mesh = init_device_mesh("cpu", (4, 2))
    strided = (_StridedShard(0, split_factor=2), Shard(0))

    def spec(flag: bool) -> DTensorSpec:
        return DTensorSpec(mesh, strided, meta((16, 16)), use_strided_shard_as_shard_order=flag)

    others = [DTensorSpec(mesh, (Shard(0), Shard(1)), meta((16, 16)))]
    args = [each for flag in told for each in (spec(flag), *others)] + others

    def propagated(*, faster: bool) -> list[bool | None] | str:
        from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy

        strategy = OpStrategy([OpSpec(output_specs=spec(flag), input_specs=[spec(flag)]) for flag in (True, False)])
        schema = OpSchema(torch.ops.aten.cat.default, tuple(args), {})
        found: list[bool | None] = []

        def set_flags(self: object, op_schema: Schema) -> None:
            _sharding_prop._propagate_use_strided_shard_flag(strategy, op_schema)
            found.extend(each.output_spec.use_strided_shard_as_shard_order for each in strategy.strategies)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_sharding_prop.ShardingPropagator, "propagate_op_sharding_non_cached", set_flags)
            with faster_frameworks() if faster else nullcontext():
                propagator = DTensor._op_dispatcher.sharding_propagator
                try:
                    propagator.propagate_op_sharding_non_cached(schema)
                except ValueError as refused:  # before torch 2.14, of flags that differ
                    return str(refused)
        return found

    assert propagated(faster=True) == propagated(faster=False)


def test_fake_tensors_of_a_long_list_that_are_alike_are_one(enter_world: Enter) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor._op_schema import OpSchema

    enter_world(8, 3)
    mesh = init_device_mesh("cpu", (8,))

    def fakes(shapes: list[tuple[int, ...]], *, faster: bool = True) -> list[torch.Tensor]:
        specs = tuple(DTensorSpec(mesh, (Shard(0),), meta(shape)) for shape in shapes)
        with faster_frameworks() if faster else nullcontext(), FakeTensorMode():
            (made,) = OpSchema(torch.ops.aten.cat.default, (specs,), {}).gen_fake_args()
        return list(made)

    shapes = [(16, 8), (8, 16), (16, 8)]
    ours, theirs = fakes(3 * shapes), fakes(3 * shapes, faster=False)
    assert [(each.shape, each.stride(), each.dtype) for each in ours] == [
        (each.shape, each.stride(), each.dtype) for each in theirs
    ]
    assert (len(set(map(id, ours))), len(set(map(id, theirs)))) == (2, 9)
    assert len(set(map(id, fakes(shapes)))) == 3  # a short list


@needs_flag
def test_a_strategy_is_kept_for_its_own_schema_and_operation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    def expand(mesh: object, schema: object, strategies: list[list[object]], **options: object) -> object:
        made.append((schema, *map(tuple, strategies), *options.values()))
        return object()

    first, second = object(), object()
    asked = [(first, 1, None), (first, 1, None), (second, 1, None), (first, 2, None), (first, 1, [0]), (first, 1, [0])]

    def ask(self: object, op_schema: Schema) -> list[object]:
        return [
            utils.expand_to_full_mesh_op_strategy("mesh", schema, [["shard"]], input_index=index, meshes=meshes)
            for schema, index, meshes in asked
        ]

    monkeypatch.setattr(utils, "expand_to_full_mesh_op_strategy", expand)
    monkeypatch.setattr(_sharding_prop.ShardingPropagator, "propagate_op_sharding_non_cached", ask)
    with faster_frameworks():
        propagator = DTensor._op_dispatcher.sharding_propagator
        found = propagator.propagate_op_sharding_non_cached(None)
        assert len(made) == 4
        assert [found.index(each) for each in found] == [0, 0, 2, 3, 4, 4]
        propagator.propagate_op_sharding_non_cached(None)
    assert len(made) == 8


def test_a_torch_without_these_functions_keeps_its_own() -> None:
    bare = ModuleType("bare")
    bare.ShardingPropagator = object  # type: ignore[attr-defined]
    for adapter in (chunks_when_asked, first_shard_sizes_once, flags_once, strategies_once):
        assert adapter(bare) == {}
