"""Every way of asking for a process group, and the answers about it afterwards."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fakedist.errors import RecordingError, WorldError
from fakedist.options import Job
from fakedist.world.reroute import RankStore, fake_world

Enter = Callable[..., Any]


@contextmanager
def world(size: int = 1024, rank: int = 517) -> Iterator[None]:
    with fake_world(Job(world_size=size, rank=rank, target="x")):
        yield


@pytest.mark.parametrize(
    "given",
    [
        *({"backend": name} for name in ("nccl", "gloo", "mpi", "ucc", "NCCL", "cpu:gloo,cuda:nccl")),
        {"backend": "nccl", "init_method": "env://"},
        {"backend": "nccl", "init_method": "tcp://10.0.0.1:29500", "rank": 517, "world_size": 1024},
        {"backend": "nccl", "init_method": "file:///nowhere/at/all", "rank": 517, "world_size": 1024},
        {},
    ],
    ids=str,
)
def test_every_form_of_init_process_group(given: dict[str, Any]) -> None:
    backend = given.get("backend", "").lower()
    with world():
        dist.init_process_group(**given)
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (517, 1024)
        assert dist.get_process_group_ranks(None) == list(range(1024))
        if backend:
            assert c10d._world.pg_map[dist.group.WORLD][0] == backend
            assert ":" in backend or dist.get_backend() == backend
        else:
            assert "cpu:gloo" in c10d.get_backend_config()  # and cuda:nccl where there is a GPU
        tensor = torch.ones(1)
        if backend == "nccl":
            with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
                dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)
            assert tensor.item() == 1024


@pytest.mark.parametrize("kind", [dist.HashStore, FakeStore])
def test_a_store_that_the_script_brings(kind: Any) -> None:
    with world():
        dist.init_process_group("fake" if kind is FakeStore else "gloo", store=kind(), rank=3, world_size=16)
        assert (dist.get_rank(), dist.get_world_size()) == (3, 16)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 16


def test_an_extended_backend_is_asked_by_device(enter_world: Enter) -> None:
    enter_world(8, 3, backend="cpu:gloo,cuda:nccl")
    group: Any = dist.group.WORLD
    host, gpu = (group._get_backend(torch.device(device)) for device in ("cpu", "cuda"))
    assert (host.name(), gpu.name(), host.rank(), host.size()) == ("gloo", "nccl", 3, 8)
    for backend in (host, gpu):
        assert backend.options._timeout.total_seconds() > 0
        subgroup: Any = dist.new_group([3, 4], pg_options=backend.options)
        assert subgroup._get_backend(torch.device("cpu")).options is backend.options


def test_a_group_with_this_rank(enter_world: Enter) -> None:
    notes = enter_world(8, 3)
    group: Any = dist.new_group([5, 1, 3], backend="ucc", group_desc="mine")
    assert dist.get_process_group_ranks(group) == [1, 3, 5]
    assert (dist.get_rank(group), dist.get_world_size(group)) == (1, 3)
    assert (dist.get_backend(group), group.group_desc, group.name()) == ("ucc", "mine", "ucc")
    assert dist.get_group_rank(group, 5) == 2
    assert dist.get_global_rank(group, 0) == 1
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3
    assert notes.groups[1][1:] == ("mine", [1, 3, 5], 1, "ucc")
    assert notes.calls == [("all_reduce", 1, 4, 4, (False, -1))]


def test_a_group_without_this_rank_and_wrong_ranks(enter_world: Enter) -> None:
    notes = enter_world(8, 3)
    for ranks in ([0, 1], range(2)):
        assert dist.new_group(ranks) is dist.GroupMember.NON_GROUP_MEMBER  # type: ignore[arg-type, unused-ignore]
    for wrong in ([0, 8], [-1, 0], list(range(9))):
        with pytest.raises((ValueError, RuntimeError)):
            dist.new_group(wrong)
    assert len(notes.groups) == 1


def test_ranks_in_different_groups_agree_on_the_names_that_follow() -> None:
    """Names are counted: every rank must count every group, its own or not."""
    names = []
    for rank in (0, 3, 7):
        with world(8, rank):
            dist.init_process_group("gloo")
            for start in range(0, 8, 2):
                dist.new_group([start, start + 1])
            everyone: Any = dist.new_group()
            names.append(everyone.group_name)
    assert len(set(names)) == 1


def test_a_group_that_only_its_members_make_is_not_counted_elsewhere(enter_world: Enter) -> None:
    enter_world(8, 3)
    before = c10d._world.group_count
    assert dist.new_group([0, 1], use_local_synchronization=True) in (None, dist.GroupMember.NON_GROUP_MEMBER)
    assert c10d._world.group_count == before
    group = dist.new_group([3, 4], use_local_synchronization=True)
    assert dist.get_world_size(group) == 2


def test_the_groups_of_stock_torch_have_the_same_names(enter_world: Enter) -> None:
    def named() -> list[str]:
        groups: list[Any] = [dist.group.WORLD, *[dist.new_group(list(range(start, start + 4))) for start in (0, 4)]]
        groups += [dist.new_group(), dist.new_group([1, 3, 5])]
        return [group.group_name for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    stock = named()
    dist.destroy_process_group()
    sys.excepthook = hook
    enter_world(8, 3)
    assert named() == stock


def test_subgroups(enter_world: Enter) -> None:
    enter_world(16, 5)
    mine, every = dist.new_subgroups(4)
    assert dist.get_process_group_ranks(mine) == [4, 5, 6, 7]
    assert len(every) == 4
    mine, _ = dist.new_subgroups_by_enumeration([[0, 5], [1, 2]])
    assert dist.get_process_group_ranks(mine) == [0, 5]


def test_a_split_group(enter_world: Enter) -> None:
    enter_world(8, 5, backend="nccl")
    parent = dist.new_group([1, 3, 5, 7])
    part: Any = dist.split_group(parent, [[0, 1], [2, 3]], group_desc="half")
    assert dist.get_process_group_ranks(part) == [5, 7]
    assert (dist.get_rank(part), dist.get_backend(part), part.group_desc) == (0, "nccl", "half")
    turned: Any = dist.split_group(parent, [[3, 2], [0, 1]])
    keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    assert dist.get_process_group_ranks(turned) == ([7, 5] if keeps_order else [5, 7])
    assert dist.split_group(parent, [[0, 1]]) in (None, dist.GroupMember.NON_GROUP_MEMBER)
    again: Any = dist.split_group(parent, [[0, 1], [2, 3]])
    assert again.group_name != part.group_name
    for wrong in (None, [], [[]], [[2, 2]]):
        with pytest.raises(ValueError, match="split"):
            dist.split_group(parent, wrong)


@pytest.mark.parametrize("size", [8, 1024])
def test_device_meshes(enter_world: Enter, size: int) -> None:
    enter_world(size, size // 2 + 1)
    mesh = init_device_mesh("cpu", (size // 4, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    assert list(mesh.get_coordinate() or []) == [size // 8, 0, 1]
    assert (mesh["tp"].size(), mesh["dp"].size()) == (2, size // 4)
    assert dist.get_process_group_ranks(mesh.get_group("tp")) == [size // 2, size // 2 + 1]
    assert dist.get_process_group_ranks(mesh.get_group("dp")) == list(range(1, size, 4))
    flat = mesh["dp", "pp"]._flatten("batch")
    assert flat.size() == size // 2
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=flat.get_group())
    assert tensor.item() == size // 2


def test_a_group_can_be_destroyed_and_made_again(enter_world: Enter) -> None:
    enter_world(8, 3)
    group = dist.new_group([3, 4])
    dist.destroy_process_group(group)
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("nccl")
    assert dist.get_world_size() == 8


def test_every_backend_is_said_to_be_there() -> None:
    def answers() -> list[bool]:
        return [dist.is_nccl_available(), dist.is_gloo_available(), dist.is_mpi_available()]

    before = answers()
    with world():
        assert answers() == [True] * 3
    assert answers() == before


def everything() -> dict[str, object]:
    modules = {"c10d": c10d, "dist": dist, "mesh": sys.modules["torch.distributed.device_mesh"]}
    found: dict[str, object] = {
        f"{where}.{name}": value
        for where, module in modules.items()
        for name, value in vars(module).items()
        if callable(value)
    }
    return found | {"hook": sys.excepthook}


@pytest.mark.parametrize("error", [None, KeyError])
def test_leaving_undoes_everything(error: type[Exception] | None) -> None:
    before = everything()
    with pytest.raises(error) if error else nullcontext(), world():
        dist.init_process_group("nccl")
        assert everything() != before
        if error:
            raise error
    assert everything() == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "name", ["_new_process_group_helper", "_new_group_with_tag", "rendezvous", "split_group", "all_gather_object"]
)
def test_a_torch_without_a_target_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(c10d, name)
    rest = everything()
    with pytest.raises(RecordingError, match=name) as caught, world():
        pass
    assert "pip install torch" in caught.value.hint
    assert everything() == rest


def test_a_group_without_a_description_is_called_by_the_line_that_made_it(enter_world: Enter) -> None:
    notes = enter_world(8, 5)
    described = dist.new_group([4, 5], group_desc="pairs")
    plain = dist.new_group([1, 5])
    names = [name for _, name, *_ in notes.groups]
    assert names[:2] == ["default_pg", "pairs"]
    assert re.fullmatch(r"test_reroute\.py:\d+ \(test_a_group_without_a_description\w+\)", names[2])
    assert (described.group_desc, plain.group_desc) == ("pairs", "undefined")  # torch's own word


def test_groups_of_hybrid_sharding_are_called_by_what_they_are_for(enter_world: Enter) -> None:
    notes = enter_world(16, 5)
    initialised = pytest.importorskip("torch.distributed.fsdp._init_utils")
    initialised._init_intra_and_inter_node_groups(dist.group.WORLD, 8)
    assert [(name, ranks) for _, name, ranks, *_ in notes.groups[1:]] == [
        ("fsdp shard", list(range(8))),
        ("fsdp replicate", [5, 13]),
    ]


@pytest.fixture
def store() -> Any:
    return RankStore(8)


def test_what_was_set_can_be_read_waited_for_appended_to_and_deleted(store: Any) -> None:
    store.set("text", "value")
    store.set("bytes", b"\x00\xff")
    assert (store.get("text"), store.get("bytes"), store.num_keys()) == (b"value", b"\x00\xff", 2)
    assert store.check(["text", "bytes"])
    assert not store.check(["text", "other"])
    store.wait(["text"])
    store.wait(["text"], timedelta(seconds=1))
    store.append("log", "a")
    store.append("log", b"b")
    store.multi_set(["x", "y"], ["1", b"2"])
    assert store.multi_get(["log", "x", "y"]) == [b"ab", b"1", b"2"]
    assert store.has_extended_api()
    assert store.delete_key("text")
    assert not store.delete_key("text")
    store.set_timeout(timedelta(seconds=5))
    assert store.timeout == timedelta(seconds=5)


@pytest.mark.parametrize("ask", [lambda store: store.get("other/3"), lambda store: store.wait(["other/3"])])
def test_what_another_rank_would_set_is_an_error_at_once(store: Any, ask: Callable[[Any], object]) -> None:
    with pytest.raises(WorldError, match="'other/3'"):
        ask(store)


def test_counters_count_for_every_rank(store: Any) -> None:
    assert [store.add("arrived", number) for number in (1, 1, 0)] == [8, 16, 16]
    assert store.get("arrived") == b"16"


@pytest.mark.skipif(not hasattr(dist.Store, "barrier"), reason="newer torch has it")
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_a_barrier_of_some_of_the_ranks_ends(store: Any, num_ranks: int) -> None:
    group = dist.PrefixStore("group", store)
    with pytest.raises(WorldError, match="'group/meet/last_member'"):
        group.wait(["meet/last_member"])
    group.barrier("meet", num_ranks)
    assert store.get("group/meet/num_members") == b"8"


def test_compare_and_set(store: Any) -> None:
    assert store.compare_set("key", "", "first") == b"first"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "second") == b"second"
    assert store.compare_set("absent", "expected", "value") == b"expected"
    assert not store.check(["absent"])


def test_torchs_own_prefix_works_on_it(store: Any) -> None:
    prefixed = dist.PrefixStore("group", dist.PrefixStore("deep", store))
    prefixed.set("key", "value")
    prefixed.wait(["key"])
    assert (prefixed.get("key"), prefixed.add("count", 1), store.num_keys()) == (b"value", 8, 2)
    assert prefixed.check(["key"])
    assert prefixed.compare_set("key", "value", "next") == b"next"
    assert prefixed.delete_key("key")


def test_every_group_has_a_part_of_the_jobs_store(enter_world: Callable[..., Any]) -> None:
    enter_world(8, 3)
    job_store: Any = c10d._get_default_store()
    job_store.set("key", "value")
    assert job_store.get("key") == b"value"
    group: Any = dist.new_group([3, 4])
    assert not c10d._get_process_group_store(group).check(["key"])
