"""Axes of parallelism are found by the names of groups and by what they are used for; otherwise nothing is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from fakedist.analysis.recording import Recording
from fakedist.analysis.topology import (
    Topology,
    axes_of,
    call_table,
    collective_table,
    find_pipeline,
    find_replicas,
    find_topology,
    group_table,
    term_table,
)
from fakedist.errors import JobError
from fakedist.rundir.rows import CallRow, CallTerms, CallWait, GroupRow
from fakedist.units import parse_rank_list
from tests.unit.analysis.recorded import HandMade

LAYERS = ["", "(Gpt)", "layers", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "norm"]
SIDE, MAIN = 77, 0


class Recorded:
    """Tables of one step whose forward is operations 0 to 99, backward 100 to 199, and the optimizer 250 to 299."""

    def __init__(self, groups: Sequence[tuple[str, int]], num_steps: int = 1) -> None:
        self.groups, self.calls, self.num_steps = groups, [], num_steps

    def call(self, operation: str, group: int, op: int, **more: Any) -> Recorded:
        phase = "forward" if op < 100 else "backward" if op < 200 else "optimizer" if 250 <= op < 300 else "other"
        row = {"operation": operation, "group": group, "op": op, "phase": phase, "bytes_in": 10, "bytes_out": 3}
        rest = {"layer": 0, "stream": MAIN, "asynchronous": False, "peer": -1, "step": 1}
        self.calls.append({**row, **rest, **more})
        return self

    def read(self, name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        backends = {"gloo": "gloo"}
        tables = {
            "steps": pd.DataFrame({"step": range(1, self.num_steps + 1)}),
            "groups": pd.DataFrame(
                [(name, "", backends.get(name, "nccl"), size, 0, "") for name, size in self.groups],
                columns=["name", "description", "backend", "size", "group_rank", "ranks"],
            ),
            "calls": pd.DataFrame(self.calls, columns=["operation", "group", "op", "phase", "bytes_in", "bytes_out",
                                                       "layer", "stream", "asynchronous", "peer", "step"]),
            "layers": pd.DataFrame({"name": LAYERS}),
            "spans": pd.DataFrame([(1, "forward", 0), (1, "backward", 1), (1, "other", 2), (1, "optimizer", 3)],
                                  columns=["step", "phase", "first_event"]),
            "events": pd.DataFrame({"op": [0, 100, 200, 250]}),
            "blocks": pd.DataFrame(
                [(100, MAIN, "forward", 1, "activation"), (900, SIDE, "forward", 1, "parameter")],
                columns=["bytes", "stream", "phase", "step", "category"],
            ),
        }  # fmt: skip
        return tables[name] if columns is None else tables[name][list(columns)]

    def found(self) -> Topology:
        return find_topology(self.read)


def streams(recorded: Recorded) -> list[str]:
    return [row.stream for row in recorded.found().calls]


def overlaps(recorded: Recorded) -> list[list[object]]:
    """ "compute" and the numbers of calls that can run at the same time, of each row."""
    return [[*(["compute"] if each.compute else []), *each.calls] for each in recorded.found().overlaps]


def test_calls_of_the_last_step_are_counted_by_group_operation_and_layers() -> None:
    recorded = Recorded([("tp", 2), ("dp", 4)]).call("all_reduce", 0, 5).call("all_reduce", 0, 105)
    recorded.call("all_reduce", 1, 210).call("all_reduce", 0, 5, step=0)
    rows = [(row.group, row.operation, row.num_calls, row.bytes_in, row.bytes_out) for row in recorded.found().calls]
    assert rows == [(0, "all_reduce", 2, 20, 6), (1, "all_reduce", 1, 10, 3)]
    recorded = Recorded([("tp", 2), ("dp", 2)])
    recorded.call("all_reduce", 0, 5, layer=4).call("all_reduce", 0, 6, layer=4).call("all_reduce", 0, 7, layer=6)
    recorded.call("all_gather", 1, 8, layer=3).call("all_gather", 1, 9, layer=7)
    assert [(row.num_layers, row.of_layers) for row in recorded.found().calls] == [(2, 2), (1, 2)]


def test_calls_outside_of_phases_say_when_they_were_most_frequent_first() -> None:
    init = Recorded([("world", 8)], num_steps=0).call("broadcast", 0, 5, step=0, phase="init").found()
    assert (init.step, [row.when for row in init.calls]) == (0, [["init"]])
    between = Recorded([("dp", 4)]).call("all_reduce", 0, 205).call("all_reduce", 0, 206).call("all_reduce", 0, 305)
    assert [row.when for row in between.found().calls] == [["after backward", "after optimizer"]]


def test_two_groups_on_two_streams_run_at_once_and_one_group_or_one_stream_does_not() -> None:
    def both(group: int) -> Recorded:
        made = Recorded([("dp", 4), ("gather", 4)]).call("all_gather", group, 105, asynchronous=True, stream=5)
        return made.call("reduce_scatter", 0, 110, stream=SIDE)

    assert streams(both(0)) == streams(both(1)) == ["own", "1"]
    assert overlaps(both(0)) == [["compute"], ["compute"]]
    assert overlaps(both(1)) == [["compute", 1], ["compute", 0]]
    shared = Recorded([("dp", 4), ("tp", 4)]).call("all_gather", 0, 5, stream=SIDE)
    assert overlaps(shared.call("all_reduce", 1, 6, stream=SIDE)) == [["compute"], ["compute"]]


def test_calls_overlap_by_their_streams_and_peers() -> None:
    recorded = Recorded([("tp", 2), ("dp", 4)]).call("all_reduce", 0, 5).call("all_reduce", 1, 6, asynchronous=True)
    assert streams(recorded) == ["compute", "own"]
    assert overlaps(recorded) == [[1], ["compute", 0]]
    recorded = Recorded([("pp", 4)]).call("recv", 0, 5, peer=0).call("send", 0, 6, peer=2)
    assert overlaps(recorded) == [["compute", 1], ["compute", 0]]
    recorded = Recorded([("pp", 2)]).call("recv", 0, 5, peer=1).call("send", 0, 6, peer=1)
    assert overlaps(recorded) == [["compute"], ["compute"]]
    recorded = Recorded([("gloo", 4), ("nccl", 4), ("alone", 1)]).call("all_reduce", 0, 5)
    recorded.call("all_gather_object", 1, 6).call("all_reduce", 2, 7, asynchronous=True)
    assert streams(recorded) == ["host", "host", "own"]
    assert overlaps(recorded) == [["compute"], ["compute"], []]


def talk(made: HandMade) -> Recording:
    layer = made.layer("head")
    made.op("forward", 1, layer)
    made.record(
        "groups",
        rows=[(1, "3", "tp", (0, 1), 0, 1, "nccl"), (0, "0", "default_pg", (0, 8), 1, 1, "cpu:gloo,cuda:nccl")],
    )
    rows = [
        (0, "broadcast", 0, 10, 10, "float32", False, 0, 0, -1, -1, 0, 0),
        (1, "all_reduce", 1, 100, 100, "bfloat16", True, 7, 1, 0, -1, 0, 0),
        (2, "all_reduce", 0, 1_000, 1_000, "float32", False, 0, 1, 0, -1, 0, 0),
        (3, "all_reduce", 1, 300, 300, "bfloat16", True, 7, 1, 0, -1, 0, 0),
        (4, "all_gather_into_tensor", 0, 500, 4_000, "float32", False, 0, 1, 0, -1, 0, 0),
        (5, "send", 0, 20, 0, "float32", False, 0, 1, 0, 3, 0, 0),
    ]
    made.record("calls", rows=rows[:2])
    made.record("calls", rows=rows[2:])
    return made.read()


def test_calls_and_groups_are_tables_of_a_recording(made: HandMade) -> None:
    recording = talk(made)
    calls = call_table(recording)
    assert calls["sequence"].tolist() == [0, 1, 2, 3, 4, 5]
    assert calls[["step", "phase", "layer"]].to_numpy().tolist() == [[0, "other", 0], *[[1, "forward", 1]] * 5]
    assert calls["peer"].tolist() == [-1, -1, -1, -1, -1, 3]
    summed = ["group", "operation", "num_calls", "bytes_in", "bytes_out"]
    assert collective_table(calls)[summed].to_numpy().tolist() == [  # most bytes first
        [0, "all_gather_into_tensor", 1, 500, 4_000],
        [0, "all_reduce", 1, 1_000, 1_000],
        [1, "all_reduce", 2, 400, 400],
        [0, "send", 1, 20, 0],
        [0, "broadcast", 1, 10, 10],
    ]
    groups = group_table(recording)  # in the order in which they were made
    assert groups[["name", "description", "size", "group_rank", "ranks"]].to_numpy().tolist() == [
        ["0", "default_pg", 8, 1, "0-7"],
        ["3", "tp", 2, 1, "0,1"],
    ]


def test_a_rank_that_made_no_call_has_empty_tables(made: HandMade) -> None:
    recording = made.read()
    assert call_table(recording).empty
    assert group_table(recording).empty
    assert collective_table(call_table(recording)).empty


def test_the_host_waits_where_a_communicator_is_made_in_barriers_and_in_calls_of_its_own_tensors() -> None:
    recording = Recording(bound={1}, call_lines=[["train.py:9 (step)", "train.py:30 (<module>)"]])
    calls: list[tuple[str, int, bool, int, CallTerms]] = [
        ("all_reduce", 0, True, -1, CallTerms("SUM", lines=0)),  # makes the group's communicator
        ("all_reduce", 0, True, -1, CallTerms("SUM")),
        ("send", 0, False, 1, CallTerms()),  # makes that of two ranks
        ("send", 0, False, 1, CallTerms()),
        ("send", 0, False, 1, CallTerms(batch=1)),
        ("all_reduce", 1, True, -1, CallTerms("SUM")),  # its group was bound to its device
        ("send", 1, False, 1, CallTerms()),
        ("barrier", 1, False, -1, CallTerms()),
        ("all_reduce", 2, False, -1, CallTerms("SUM", on_host=True)),
        ("all_reduce", 2, True, -1, CallTerms("SUM", on_host=True)),
    ]
    for sequence, (operation, group, is_async, peer, terms) in enumerate(calls):
        recording.calls.append(CallRow(sequence, operation, group, 8, 8, "float32", is_async, 0, 0, 0, peer))
        recording.call_terms.append(terms)
    table = term_table(recording)
    assert table["waits"].tolist() == [True, False, True, False, False, False, False, True, True, False]
    assert table["own_pair"].tolist() == [False, False, True, True, False, False, False, False, False, False]
    assert table["lines"].tolist()[:2] == ["train.py:9 (step)\ntrain.py:30 (<module>)", ""]


def test_of_several_waits_for_a_call_the_first_counts() -> None:
    recording = Recording(call_waits=[CallWait(1, 2, 7), CallWait(1, 3, 8)])
    for sequence in range(2):
        recording.calls.append(CallRow(sequence, "all_reduce", 0, 8, 8, "float32", True, 0, 0, 0, -1))
        recording.call_terms.append(CallTerms(parts=("float32 3", "float32 5")[: 2 * sequence], join="inside"))
    table = term_table(recording)
    assert table["awaited"].isna().tolist() == [True, False]
    assert table[["parts", "join", "awaited", "awaited_on"]].iloc[1].tolist() == [
        "float32 3\nfloat32 5",
        "inside",
        2,
        7,
    ]


@pytest.mark.parametrize(
    ("backend", "on_host"),
    [("nccl", [False, False]), ("gloo", [True, True]), ("cpu:gloo,cuda:nccl", [False, True])],
)
def test_the_host_makes_the_calls_of_gloo_also_those_of_a_gpus_tensors(backend: str, on_host: list[bool]) -> None:
    recording = Recording(groups=[GroupRow(0, "0", "default_pg", (0, 1), 0, 0, backend)])
    for sequence, (operation, dtype) in enumerate((("all_reduce", "float32"), ("monitored_barrier", ""))):
        recording.calls.append(CallRow(sequence, operation, 0, 8, 8, dtype, False, 0, 0, 0, -1))
        recording.call_terms.append(CallTerms())
    assert term_table(recording)["on_host"].tolist() == on_host


def groups_of(rank: int, *rows: tuple[str, str]) -> pd.DataFrame:
    """Groups of description and ranks."""
    made = []
    for number, (description, ranks) in enumerate(rows):
        numbers = parse_rank_list(ranks)
        made.append((str(number), description, "nccl", len(numbers), numbers.index(rank), ranks))
    return pd.DataFrame(made, columns=["name", "description", "backend", "size", "group_rank", "ranks"])


def calls_of(*rows: tuple[str, int, int, str]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["operation", "group", "peer", "phase"])


WORLD = ("default_pg", "0-7")
NONE = calls_of()


@pytest.mark.parametrize(
    ("label", "axes"),
    [
        ("PIPELINE_MODEL_PARALLEL_GROUP", {"pipeline"}),
        ("TENSOR_MODEL_PARALLEL_GROUP", {"tensor"}),
        ("MODEL_PARALLEL_GROUP", {"model"}),
        ("DATA_PARALLEL_GROUP_WITH_CP", {"data", "context"}),
        ("EXPERT_MODEL_PARALLEL_GROUP", {"expert"}),
        ("mesh_pp", {"pipeline"}),
        ("mesh_dp_shard_cp", {"data", "context"}),
        ("TP", {"tensor"}),
        ("default_pg", set()),
        ("17", set()),
    ],
)
def test_a_label_names_axes(label: str, axes: set[str]) -> None:
    assert axes_of(label) == axes


@pytest.mark.parametrize(
    ("rank", "groups", "calls", "group", "ranks", "why"),
    [
        (1, [WORLD, ("MODEL_PARALLEL_GROUP", "0-7"), ("TP", "0,1"), ("PP", "1,3,5,7")], [], "PP", (1, 3, 5, 7), "PP"),
        # The rank exchanges with all others.
        (1, [("default_pg", "0-1")], [("send", 0, 0, "forward")], "default_pg", (0, 1), ""),
        # A group without a name, whose ranks alone exchange.
        (
            0,
            [WORLD, ("", "0,1"), ("", "0,2,4,6")],
            [("send", 0, 2, "forward"), ("all_reduce", 1, -1, "forward")],
            "2",
            (0, 2, 4, 6),
            "rank 0 sends to or receives from rank 2",
        ),
    ],
)
def test_the_pipeline_is_the_group_of_that_name_or_the_one_that_exchanges(
    rank: int,
    groups: list[tuple[str, str]],
    calls: list[tuple[str, int, int, str]],
    group: str,
    ranks: tuple[int, ...],
    why: str,
) -> None:
    found = find_pipeline(groups_of(rank, *groups), calls_of(*calls), rank)
    assert found is not None
    assert (found.group, found.ranks) == (group, ranks)
    assert why in found.why


@pytest.mark.parametrize(("others", "peer"), [([("", "0,4"), ("", "0,2,4,6")], 4), ([], 1)])
def test_where_the_pipeline_is_not_certain_the_error_says_what_to_type(
    others: list[tuple[str, str]], peer: int
) -> None:
    """Several groups could be it, or sends on the default group alone do not show all stages."""
    with pytest.raises(JobError, match="which group of rank 0 is its pipeline") as raised:
        find_pipeline(groups_of(0, WORLD, *others), calls_of(("send", 0, peer, "forward")), 0)
    assert raised.value.hint == f"name one rank of each stage: --rank 0,{peer}"


def test_neither_a_tensor_group_nor_a_ring_of_context_parallel_ranks_is_a_pipeline() -> None:
    assert find_pipeline(groups_of(0, WORLD, ("TP", "0,1")), NONE, 0) is None
    ring = groups_of(0, WORLD, ("CONTEXT_PARALLEL_GROUP", "0,1"))
    assert find_pipeline(ring, calls_of(("send", 1, 1, "forward")), 0) is None


def test_ranks_of_tensor_and_pipeline_groups_share_their_tokens_and_others_do_not() -> None:
    groups = groups_of(0, WORLD, ("TP", "0,1"), ("PP", "0,2"), ("DP", "0,4"))
    found = find_replicas(groups, calls_of(("all_reduce", 3, -1, "backward")), 8)
    assert (found.number, found.text) == (2, "8 ranks / (2 tensor x 2 pipeline)")
    with_context = groups_of(0, WORLD, ("mesh_dp", "0,4"), ("mesh_cp", "0,2"), ("mesh_tp", "0,1"))
    assert find_replicas(with_context, NONE, 8).number == 4
    fsdp = calls_of(("all_gather_into_tensor", 0, -1, "forward"), ("reduce_scatter_tensor", 0, -1, "backward"))
    assert find_replicas(groups_of(0, WORLD), fsdp, 8).number == 8


def test_ranks_that_exchange_nothing_read_tokens_of_their_own() -> None:
    assert find_replicas(groups_of(0), NONE, 8).number == 8  # the script makes no process group
    assert find_replicas(groups_of(0, WORLD), NONE, 8).number == 8
    assert find_replicas(groups_of(0, WORLD, ("TP", "0,1")), NONE, 8).number == 0


@pytest.mark.parametrize(
    ("rows", "call", "why"),
    [
        ((WORLD,), ("all_reduce", 0, -1, "forward"), "do not show how 8 ranks share"),
        ((WORLD, ("", "0,1")), ("all_reduce", 1, -1, "forward"), "what the group 1 of 2 ranks is for is not known"),
        ((WORLD, ("TP", "0,1")), ("all_reduce", 1, -1, "forward"), "do not show how 4 ranks share"),
        ((WORLD, ("TP", "0,1"), ("tensor", "0-3")), ("all_reduce", 1, -1, "forward"), "groups of several sizes"),
    ],
)
def test_what_groups_do_not_show_is_not_assumed(
    rows: tuple[tuple[str, str], ...], call: tuple[str, int, int, str], why: str
) -> None:
    found = find_replicas(groups_of(0, *rows), calls_of(call), 8)
    assert found.number == 0
    assert why in found.text
