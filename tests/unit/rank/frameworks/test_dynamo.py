"""Dynamo sees nothing of ours: not where it starts with a frame, not where it looks into a call."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import trace_rules
from torch._dynamo.types import ConvertFrameReturn
from torch.distributed import distributed_c10d as c10d

import fakedist
from fakedist.rank.frameworks.dynamo import _RUN_THE_SCRIPTS, codes_of_ours
from fakedist.world.arrivals import Arrivals
from fakedist.world.group import BareGroup, OneBackend
from fakedist.world.process_group import Done
from fakedist.world.reroute import DispatchedGroup, RankStore

Enter = Callable[..., Any]
PACKAGE = str(Path(fakedist.__file__).parent)
SIZE, RANK = 4, 1
CPU = torch.device("cpu")


def slots() -> list[torch.Tensor]:
    return [torch.ones(2) for _ in range(SIZE)]


#: What each public method of a group is called with.
GROUP_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "abort": tuple,
    "all_gather_single": lambda: (torch.ones(8), torch.ones(2)),
    "all_gather_single_coalesced": lambda: ([torch.ones(8)], [torch.ones(2)]),
    "all_to_all_single": lambda: (torch.ones(8), torch.ones(8), [], []),
    "allgather": lambda: ([slots()], [torch.ones(2)]),
    "allgather_coalesced": lambda: ([[torch.ones(2)] for _ in range(SIZE)], [torch.ones(2)]),
    "allgather_into_tensor_coalesced": lambda: ([torch.ones(8)], [torch.ones(2)]),
    "allreduce": lambda: ([torch.ones(2)],),
    "allreduce_coalesced": lambda: ([torch.ones(2)],),
    "alltoall": lambda: (slots(), slots()),
    "alltoall_base": lambda: (torch.ones(8), torch.ones(8), [], []),
    "backend_of": lambda: ("cpu",),
    "barrier": tuple,
    "broadcast": lambda: ([torch.ones(2)],),
    "gather": lambda: ([], [torch.ones(2)]),
    "gather_into_tensor": lambda: (torch.ones(8), torch.ones(2)),
    "gather_single": lambda: (torch.ones(8), torch.ones(2)),
    "getBackendName": tuple,
    "getGroupName": tuple,
    "get_backend": lambda: (CPU,),
    "get_group_store": tuple,
    "monitored_barrier": tuple,
    "name": tuple,
    "recv": lambda: ([torch.ones(2)], 0),
    "recv_anysource": lambda: ([torch.ones(2)],),
    "reduce": lambda: ([torch.ones(2)],),
    "reduce_scatter": lambda: ([torch.ones(2)], [slots()]),
    "reduce_scatter_single": lambda: (torch.ones(2), torch.ones(8)),
    "reduce_scatter_single_coalesced": lambda: ([torch.ones(2)], [torch.ones(8)]),
    "reduce_scatter_tensor_coalesced": lambda: ([torch.ones(2)], [torch.ones(8)]),
    "scatter": lambda: ([torch.ones(2)], []),
    "send": lambda: ([torch.ones(2)], 0),
    "set_timeout": lambda: (timedelta(1),),
    "shutdown": tuple,
}
#: Of torch: what a group is besides. Kernels of torch.ops.symm_mem call the last two, below all that Dynamo sees.
NOT_CALLED = {"named", "rank", "size", "group_name", "group_desc", "symmetric", "symmetric_barrier", "dispatched"}
WORK_CALLS = (
    "block_current_stream", "exception", "getFuture", "get_future", "is_completed", "is_success", "result",
    "source_rank", "synchronize", "wait",
)  # fmt: skip


def public(kind: type) -> dict[str, FunctionType]:
    """Public methods of a class that are ours."""
    found = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


def is_ours(function: Any) -> bool:
    return bool(function.__code__.co_filename.startswith(PACKAGE))


def frames_of(method: Callable[..., Any], *arguments: Any) -> list[CodeType]:
    """Be Dynamo during a call: every frame that ``torch.compile`` would be asked to compile."""
    frames: list[CodeType] = []

    def callback(frame: Any, *_: Any) -> ConvertFrameReturn:
        frames.append(frame.f_code)
        return ConvertFrameReturn(apply_to_code=False)

    evaluation: Any = torch._C._dynamo.eval_frame
    set_eval_frame = evaluation.set_eval_frame
    before = set_eval_frame(callback)
    try:
        method(*arguments)
    finally:
        set_eval_frame(before)
    return frames


def test_every_public_method_is_called_here() -> None:
    ours = {name for name in public(DispatchedGroup) if name not in NOT_CALLED}
    assert ours == set(GROUP_CALLS)
    assert set(public(Done)) == set(WORK_CALLS)


@pytest.mark.parametrize("name", sorted(GROUP_CALLS))
def test_no_frame_starts_in_a_call_of_a_group(enter_world: Enter, name: str) -> None:
    enter_world(SIZE, RANK)
    arguments, method = GROUP_CALLS[name](), getattr(c10d._get_default_group(), name)
    assert frames_of(method, *arguments) == []


def test_no_frame_starts_in_a_call_of_a_work_and_those_of_others_do(enter_world: Enter) -> None:
    enter_world(SIZE, RANK)
    for name in WORK_CALLS:
        work: Any = dist.all_reduce(torch.ones(2), async_op=True)
        assert frames_of(getattr(work, name)) == [], name
    assert "cleandoc" in {code.co_name for code in frames_of(inspect.cleandoc, "text")}


@pytest.mark.parametrize("kind", [DispatchedGroup, BareGroup, OneBackend, Done, RankStore, Arrivals])
def test_dynamo_looks_into_no_method(enter_world: Enter, kind: type) -> None:
    enter_world(SIZE, RANK)
    assert public(kind)
    for name, method in public(kind).items():
        assert trace_rules.check_verbose(method, is_inlined_call=True).skipped, name


def test_dynamo_looks_into_nothing_that_stands_for_torch_s_own(enter_world: Enter) -> None:
    enter_world(SIZE, RANK)
    everything = [value for owner in (c10d, dist) for value in vars(owner).values()]
    replaced = [value for value in everything if type(value) in (FunctionType, MethodType) and is_ours(value)]
    assert {"new_group", "split_group", "all_gather_object", "broadcast_object_list"} <= {
        value.__name__ for value in replaced
    }
    for value in replaced:
        assert trace_rules.check_verbose(value, is_inlined_call=True).skipped, value


def test_every_function_of_ours_is_marked() -> None:
    assert [name for name in _RUN_THE_SCRIPTS if importlib.util.find_spec(name) is None] == []
    codes = {code for code, _ in codes_of_ours()}
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("fakedist.") else ():
            if isinstance(value, FunctionType) and value.__module__ == name and not hasattr(value, "__wrapped__"):
                assert value.__code__ in codes, value
    assert {method.__code__ for method in public(Done).values()} <= codes


def test_the_list_of_files_is_torch_s_own_afterwards(enter_world: Enter) -> None:
    assert not any(PACKAGE in name for name in trace_rules.FORCE_SKIP_FILES)
    enter_world(SIZE, RANK)
    assert any(PACKAGE in name for name in trace_rules.FORCE_SKIP_FILES)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_compiled_call_gives_what_it_gives_without_in_one_graph_where_nccl_s_is(
    enter_world: Enter, is_async: bool
) -> None:
    enter_world(SIZE, RANK)
    group: Any = c10d._get_default_group()

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor * 2
        work: Any = dist.all_reduce(mine, async_op=is_async)
        if is_async:
            work.wait()
        return mine + 1

    torch._dynamo.reset()
    compiled = torch.compile(reduced, backend="eager" if is_async else "aot_eager", fullgraph=not is_async)
    assert compiled(torch.ones(3)).tolist() == [9.0, 9.0, 9.0]
    assert is_async or group._get_sequence_number_for_group() == 1
