"""Calls that depend on other ranks, and where the step of a pipeline stage begins."""

import numpy as np
import pandas as pd

from fakedist.cost_model.job.stages import dependencies_of, from_first_transfer
from fakedist.cost_model.timeline import Timeline

GROUPS = pd.DataFrame(
    {"ranks": ["0-7", "0,4", "4,0", "2,4"], "description": ["default_pg", "PP", "PP", "TP"], "name": list("abcd")}
)


def launches_of(*rows: tuple[str, int, str]) -> pd.DataFrame:
    """Rows of kind, call and phase, each on the default stream."""
    table = pd.DataFrame(rows, columns=["what", "call", "phase"])
    table["work"] = np.where(table["what"].str.contains("stream"), -1, 0)
    return table.assign(stream=0, event=0, num_operations=0, graph=0, device=0, row=range(len(table)))


def calls_of(*rows: tuple[int, str, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["sequence", "operation", "group", "peer"])


def test_the_peer_of_a_call_is_the_rank_at_its_place_in_the_group() -> None:
    launches = launches_of(("collective", 3, "forward"), ("kernel", -1, "forward"), ("collective", 5, "forward"))
    calls = calls_of((3, "send", 2, 1), (5, "recv", 3, 0))
    found = dependencies_of((launches, calls, GROUPS), Timeline(launches), np.array([7.0, 1.0, 9.0]), 4, {4, 2})
    send, receive = (each[0] for each in found.transfers)
    assert (send.row, send.is_send, send.peer, send.time_us) == (0, True, 0, 7.0)
    assert (receive.row, receive.is_send, receive.peer, receive.time_us) == (2, False, 2, 9.0)
    assert (found.num_exchanged, found.elsewhere) == (1, (0,))
    launches = launches_of(("collective", 3, "forward"))
    found = dependencies_of((launches, calls_of((3, "send", 1, 1)), GROUPS), Timeline(launches), np.ones(1), 0, {0, 2})
    assert (found.num_exchanged, found.elsewhere) == (0, (4,))


def test_collectives_of_several_given_ranks_are_met_and_others_are_not() -> None:
    launches = launches_of(("collective", 1, "other"), ("collective", 2, "other"))
    calls = calls_of((1, "all_reduce", 0, -1), (2, "all_reduce", 3, -1))
    found = dependencies_of((launches, calls, GROUPS), Timeline(launches), np.ones(2), 0, {0, 4})
    assert [[each.row for each in calls] for calls in found.transfers] == [[0]]
    assert found.transfers[0][0].members == frozenset(range(8))


def test_groups_alike_are_told_apart_by_their_order() -> None:
    twice = pd.DataFrame({"ranks": ["0,4", "0,4"], "description": ["PP", "PP"], "name": ["17", "18"]})
    launches = launches_of(("collective", 1, ""), ("kernel", -1, ""), ("collective", 2, ""))
    calls = calls_of((1, "send", 0, 1), (2, "send", 1, 1))
    found = dependencies_of((launches, calls, twice), Timeline(launches), np.ones(3), 0, {0, 4})
    names = [each[0].group for each in found.transfers]
    assert len(set(names)) == 2


def test_the_receive_of_the_next_iteration_stands_for_the_steps_own() -> None:
    launches = launches_of(
        ("kernel", -1, "forward"),
        ("collective", 1, "other"),
        ("kernel", -1, "optimizer"),
        ("collective", 2, "other"),
        ("stream_records", -1, "other"),
        ("stream_waits", -1, "other"),
        ("collective", 3, "other"),
    )
    calls = calls_of((1, "send", 1, 0), (2, "all_reduce", 0, -1), (3, "recv", 1, 0))
    assert from_first_transfer(launches, calls)["row"].tolist() == [4, 5, 6, 0, 1, 2, 3]
    launches = launches_of(("collective", 1, "forward"), ("kernel", -1, "optimizer"), ("collective", 2, "other"))
    calls = calls_of((1, "recv", 1, 0), (2, "all_reduce", 0, -1))
    assert from_first_transfer(launches, calls)["row"].tolist() == [0, 1, 2]
