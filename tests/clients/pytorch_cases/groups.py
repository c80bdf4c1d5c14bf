"""Groups, meshes and objects."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from cases import Rank, case, raises, same


@case("test_c10d_common.py: test_new_group", "ranks of a group and of the job translate; others are refused")
def new_group(rank: Rank) -> None:
    members = list(range(rank.rank % 2, rank.size, 2))
    mine = dist.new_group(members)
    assert dist.get_world_size(mine) == len(members)
    assert dist.get_process_group_ranks(mine) == members
    place = members.index(rank.rank)
    assert dist.get_rank(mine) == dist.get_group_rank(mine, rank.rank) == place
    assert dist.get_global_rank(mine, place) == rank.rank
    outside = dist.new_group([(rank.rank + 1) % rank.size])
    assert dist.get_rank(outside) == -1
    raises(lambda: dist.get_group_rank(mine, (rank.rank + 1) % rank.size), "not part of group")


@case(
    "distributed_test.py: test_new_subgroups", "subgroups of two, and a sum in mine", "all ranks hold the same numbers"
)
def subgroups(rank: Rank) -> None:
    mine, all_ = dist.new_subgroups(2)
    assert len(all_) == rank.size // 2
    assert dist.get_world_size(mine) == 2
    dist.all_reduce(tensor := rank.full(1), group=mine)
    same(tensor, 2)
    raises(lambda: dist.new_subgroups(rank.size + 1), "must not exceed")


@case("distributed_test.py: test_new_subgroups_by_enumeration", "the groups that are listed; a rank twice is refused")
def listed_subgroups(rank: Rank) -> None:
    half = rank.size // 2
    mine, all_ = dist.new_subgroups_by_enumeration([list(range(half)), list(range(half, rank.size))])
    assert len(all_) == 2
    assert rank.rank in dist.get_process_group_ranks(mine)
    raises(lambda: dist.new_subgroups_by_enumeration([[0], [0]]), "more than one subgroup", "in both subgroup")


@case(
    "test_c10d_nccl.py: test_comm_split_group",
    "the part with this rank in it reduces",
    "all ranks hold the same numbers",
)
def split_group(rank: Rank) -> None:
    half = rank.size // 2
    part = dist.split_group(split_ranks=[list(range(half)), list(range(half, rank.size))])
    assert part is not None
    assert dist.get_world_size(part) == half
    dist.all_reduce(tensor := rank.full(1), group=part)
    same(tensor, half)


@case("test_device_mesh.py: test_get_local_rank, test_slicing_2d", "places in a mesh, its slices and their groups")
def mesh_of_two_axes(rank: Rank) -> None:
    mesh = rank.mesh((rank.size // 2, 2), ("dp", "tp"))
    assert mesh.get_local_rank("tp") == rank.rank % 2
    assert mesh.get_local_rank("dp") == rank.rank // 2
    assert list(mesh.get_coordinate() or ()) == [rank.rank // 2, rank.rank % 2]
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [rank.rank // 2 * 2, rank.rank // 2 * 2 + 1]
    assert mesh["dp"].mesh.tolist() == list(range(rank.rank % 2, rank.size, 2))
    raises(lambda: mesh["pp"], "pp")


@case("test_device_mesh.py: test_flatten_mesh", "a flattened mesh has all ranks of its axes")
def flattened_mesh(rank: Rank) -> None:
    mesh = rank.mesh((rank.size // 2, 2), ("dp", "tp"))
    flat: Any = mesh["dp", "tp"]._flatten("all")
    assert flat.mesh.tolist() == list(range(rank.size))
    assert flat.size() == rank.size


@case(
    "distributed_test.py: test_all_gather_object",
    "every rank's object is in its slot",
    "all ranks give the same object",
)
def gathered_objects(rank: Rank) -> None:
    mine = {"lr": 0.1, "names": ["a", "b"]}
    dist.all_gather_object(slots := [None] * rank.size, mine)
    assert slots == [mine] * rank.size
    found: list[Any] | None = [None] * rank.size
    dist.gather_object(mine, found, dst=rank.rank)
    assert found == [mine] * rank.size


@case(
    "distributed_test.py: test_broadcast_object_list",
    "the source's objects are on all ranks",
    "the source is this rank",
)
def broadcast_objects(rank: Rank) -> None:
    objects: list[Any] = [{"step": 3}, "name"]
    dist.broadcast_object_list(objects, src=rank.rank)
    assert objects == [{"step": 3}, "name"]


@case(
    "distributed_test.py: test_broadcast_object_list",
    "another rank's objects arrive",
    why="only the source knows them: refused by name, with the command that records its tape",
)
def objects_of_another_rank(rank: Rank) -> None:
    objects: list[Any] = [None, None]
    dist.broadcast_object_list(objects, src=(rank.rank + 1) % rank.size)
    assert objects == [{"step": 3}, "name"]


@case("distributed_test.py: test_scatter_object_list", "this rank's part of a list", "the source is this rank")
def scattered_objects(rank: Rank) -> None:
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"part {i}" for i in range(rank.size)], src=rank.rank)
    assert got == [f"part {rank.rank}"]


@case("test_store.py: test_set_get, test_add", "a store keeps what is set in it", "counters count for all ranks")
def store(rank: Rank) -> None:
    kept = dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())
    kept.set("key", "value")
    assert kept.get("key") == b"value"
    assert kept.check(["key"])
    assert not kept.check(["other"])
    assert kept.add("count", 1) in (1, rank.size)
