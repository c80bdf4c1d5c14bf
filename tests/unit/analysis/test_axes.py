"""Axes of parallelism are found by the names of groups and by what they are used for; otherwise nothing is assumed."""

from __future__ import annotations

import pandas as pd
import pytest

from fakedist.analysis.axes import axes_of, find_pipeline, find_replicas
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


def test_the_pipeline_is_the_group_that_is_named_for_it() -> None:
    groups = groups_of(1, WORLD, ("MODEL_PARALLEL_GROUP", "0-7"), ("TP", "0,1"), ("PP", "1,3,5,7"))
    found = find_pipeline(groups, NONE, 1)
    assert found is not None
    assert (found.group, found.ranks) == ("PP", (1, 3, 5, 7))


def test_the_group_of_all_ranks_is_the_pipeline_if_the_rank_exchanges_with_all() -> None:
    found = find_pipeline(groups_of(1, ("default_pg", "0-1")), calls_of(("send", 0, 0, "forward")), 1)
    assert found is not None
    assert (found.group, found.ranks) == ("default_pg", (0, 1))


def test_a_group_without_a_name_is_the_pipeline_if_its_ranks_alone_exchange() -> None:
    groups = groups_of(0, WORLD, ("", "0,1"), ("", "0,2,4,6"))
    found = find_pipeline(groups, calls_of(("send", 0, 2, "forward"), ("all_reduce", 1, -1, "forward")), 0)
    assert found is not None
    assert found.ranks == (0, 2, 4, 6)
    assert "rank 0 sends to or receives from rank 2" in found.why


def test_a_ring_of_context_parallel_ranks_is_no_pipeline() -> None:
    groups = groups_of(0, WORLD, ("CONTEXT_PARALLEL_GROUP", "0,1"))
    assert find_pipeline(groups, calls_of(("send", 1, 1, "forward")), 0) is None


def test_where_several_groups_could_be_the_pipeline_the_error_says_what_to_type() -> None:
    groups = groups_of(0, WORLD, ("", "0,4"), ("", "0,2,4,6"))
    with pytest.raises(JobError, match="which group of rank 0 is its pipeline") as raised:
        find_pipeline(groups, calls_of(("send", 0, 4, "forward")), 0)
    assert raised.value.hint == "name one rank of each stage: --rank 0,4"


def test_sends_on_the_default_group_alone_do_not_show_all_stages() -> None:
    with pytest.raises(JobError, match="which group"):
        find_pipeline(groups_of(0, WORLD), calls_of(("send", 0, 1, "forward")), 0)


def test_no_pipeline_is_found_where_there_is_none() -> None:
    assert find_pipeline(groups_of(0, WORLD, ("TP", "0,1")), NONE, 0) is None


def test_ranks_of_tensor_and_pipeline_groups_share_their_tokens() -> None:
    groups = groups_of(0, WORLD, ("TP", "0,1"), ("PP", "0,2"), ("DP", "0,4"))
    found = find_replicas(groups, calls_of(("all_reduce", 3, -1, "backward")), 8)
    assert (found.number, found.text) == (2, "8 ranks / (2 tensor x 2 pipeline)")


def test_context_parallel_ranks_read_tokens_of_their_own() -> None:
    groups = groups_of(0, WORLD, ("mesh_dp", "0,4"), ("mesh_cp", "0,2"), ("mesh_tp", "0,1"))
    assert find_replicas(groups, NONE, 8).number == 4


def test_all_ranks_are_replicas_where_the_default_group_gathers_and_reduces_as_fsdp_does() -> None:
    calls = calls_of(("all_gather_into_tensor", 0, -1, "forward"), ("reduce_scatter_tensor", 0, -1, "backward"))
    assert find_replicas(groups_of(0, WORLD), calls, 8).number == 8


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
