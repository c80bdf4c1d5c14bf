"""Axes of parallelism are found by the names of groups and by what they are used for; otherwise nothing is assumed."""

import pandas as pd
import pytest

from fakedist.analysis.topology import axes_of, find_pipeline, find_replicas
from fakedist.errors import JobError
from fakedist.rank_list import parse_rank_list


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
