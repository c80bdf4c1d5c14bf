"""Answers to vLLM's groups of several ranks, in modules that have the names of vLLM 0.33.0."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fakedist.extras.rl.vllm import (
    buffers_of_graphs,
    calls_of_torch,
    groups_without_pynccl,
    nodes_of_the_job,
    objects_of_groups,
)
from tests.unit.rank.frameworks.conftest import Enter, enter_world

__all__ = ["enter_world"]  # a fixture


def test_ranks_are_on_the_nodes_that_the_launcher_says(enter_world: Enter, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_world(4, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    module = ModuleType("vllm.distributed.parallel_state")
    assert nodes_of_the_job(module) == {}
    module.in_the_same_node_as = None  # type: ignore[attr-defined]
    asked: Any = nodes_of_the_job(module)["in_the_same_node_as"]
    assert asked(dist.group.WORLD) == [True, True, False, False]
    assert asked(dist.group.WORLD, source_rank=3) == [False, False, True, True]
    assert asked(dist.new_group([1, 3])) == [True, False]


def test_a_group_of_several_ranks_has_no_communicator_of_its_own() -> None:
    made = []

    class PyNcclCommunicator:
        available = True

        def __init__(self, group: Any, device: int) -> None:
            made.append((group, device))

    module = ModuleType("pynccl")
    assert calls_of_torch(module) == {}
    module.PyNcclCommunicator = PyNcclCommunicator  # type: ignore[attr-defined]
    make: Any = calls_of_torch(module)["PyNcclCommunicator.__init__"]
    alone, several = SimpleNamespace(size=lambda: 1), SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    communicators = [PyNcclCommunicator.__new__(PyNcclCommunicator) for _ in range(2)]
    make(communicators[0], alone, 3)
    make(communicators[1], several, device=3)
    assert made == [(alone, 3)]
    assert vars(communicators[1]) == {
        "group": several, "rank": 1, "world_size": 2, "available": False, "disabled": True
    }  # fmt: skip


def test_a_group_of_sglang_has_no_communicator_of_its_own_even_in_a_graph() -> None:
    class GroupCoordinator:
        def __init__(self, ranks: list[int], use_pynccl: bool, use_custom_allreduce: bool = True) -> None:
            self.made = (ranks, use_pynccl, use_custom_allreduce)

    module = ModuleType("parallel_state")
    assert groups_without_pynccl(module) == {}
    module.GroupCoordinator = GroupCoordinator  # type: ignore[attr-defined]
    make: Any = groups_without_pynccl(module)["GroupCoordinator.__init__"]
    groups = [GroupCoordinator.__new__(GroupCoordinator) for _ in range(2)]
    make(groups[0], [0, 1], True)
    make(groups[1], [0, 1], use_pynccl=True, use_custom_allreduce=False)
    assert [group.made for group in groups] == [([0, 1], False, True), ([0, 1], False, False)]


def test_peers_have_the_buffers_of_a_graph_that_this_rank_has() -> None:
    registered = []
    module = ModuleType("custom_all_reduce")
    assert buffers_of_graphs(module) == {}
    module.CustomAllreduce = SimpleNamespace(register_graph_buffers=None)  # type: ignore[attr-defined]
    module.ops = SimpleNamespace(  # type: ignore[attr-defined]
        get_graph_buffer_ipc_meta=lambda pointer: ([pointer], [0, 64]),
        register_graph_buffers=lambda *given: registered.append(given),
    )
    (register,) = buffers_of_graphs(module).values()
    assert callable(register)
    register(SimpleNamespace(_ptr=7, world_size=2))
    assert registered == [(7, [[7], [7]], [[0, 64], [0, 64]])]


def test_objects_of_a_group_go_through_torch() -> None:
    module = ModuleType("shm_broadcast")
    assert objects_of_groups(module) == {}
    module.MessageQueue = SimpleNamespace(create_from_process_group=None)  # type: ignore[attr-defined]
    (replacement,) = objects_of_groups(module).values()
    assert isinstance(replacement, staticmethod)
    assert replacement(object(), 1 << 22, 6) is None
