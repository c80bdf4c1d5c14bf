"""The calls of a rank's timed step that depend on other ranks that are placed with it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.rank_list import parse_rank_list
from fakedist.run.launch_records import LAUNCH_KINDS
from fakedist.time.stages import Transfer, transfers_of
from fakedist.time.timeline import EVENTS, Array, Timeline

_COLLECTIVE = LAUNCH_KINDS.index("collective")


@dataclass(frozen=True)
class Dependencies:
    """What of a rank's step depends on the other ranks.

    Attributes:
        transfers: Its sends, receives and collectives with them, those that run at once in one list.
        num_exchanged: Its sends to and receives from ranks that are placed with it.
        elsewhere: The ranks that are not, and that it sends to or receives from.
    """

    transfers: list[list[Transfer]]
    num_exchanged: int
    elsewhere: tuple[int, ...]


def dependencies_of(
    tables: tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame],
    timeline: Timeline,
    duration_us: Array,
    rank: int,
    ranks: Set[int],
) -> Dependencies:
    """What of a rank's step depends on other ranks.

    Args:
        tables: The tables ``launches``, ``calls`` and ``groups``.
        timeline: The launches.
        duration_us: What each takes without waiting.
        rank: The rank.
        ranks: All ranks that are placed together.
    """
    launches, calls, groups = tables
    call_of = launches["call"].to_numpy("i8")
    is_call = timeline.has_work & (timeline.what == _COLLECTIVE) & (call_of >= 0)
    known = _known(calls[calls["sequence"].isin(call_of[is_call])], groups, rank, ranks)
    rows = call_of.copy()
    rows[~is_call] = -1
    pairs = {sequence: transfer for sequence, transfer in known.items() if not transfer.members}
    sequences = rows.tolist()
    found = transfers_of(sequences, timeline.what.tolist(), launches["stream"].tolist(), pairs)
    for row in is_call.nonzero()[0].tolist():
        if (transfer := known.get(sequences[row])) is not None and transfer.members:
            found.append([transfer._replace(row=row)])
    timed = [[each._replace(time_us=float(duration_us[each.row])) for each in together] for together in found]
    own = [each for together in timed for each in together if not each.members]
    elsewhere = {each.peer for each in own if each.peer not in ranks}
    return Dependencies(timed, sum(each.peer in ranks for each in own), tuple(sorted(elsewhere)))


def _known(calls: pd.DataFrame, groups: pd.DataFrame, rank: int, ranks: Set[int]) -> dict[int, Transfer]:
    """The calls that depend on other ranks, by sequence number."""
    members = [parse_rank_list(str(text)) if text else () for text in groups["ranks"]]
    names = _names(groups)
    columns = [calls[name].tolist() for name in ("sequence", "operation", "group", "peer")]
    found = {}
    for sequence, operation, group, peer in zip(*columns, strict=True):
        others, name = members[group], names[group]
        if str(operation).startswith(("send", "recv")):
            if 0 <= peer < len(others) and others[peer] != rank:
                found[sequence] = Transfer(-1, str(operation).startswith("send"), others[peer], name, 0.0)
        elif len(ranks & set(others)) > 1:
            found[sequence] = Transfer(-1, False, -1, f"{name} {operation}", 0.0, frozenset(others))
    return found


def _names(groups: pd.DataFrame) -> list[str]:
    """Names of groups that are the same on all their ranks: ranks, description, and place among those alike."""
    seen: dict[str, int] = {}
    found = []
    for ranks, description in zip(groups["ranks"], groups["description"], strict=True):
        key = f"{ranks} {description}"
        seen[key] = seen.get(key, -1) + 1
        found.append(f"{key} {seen[key]}")
    return found


def from_first_transfer(launches: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """The launches of a step, in front those with which an iteration begins.

    A step ends where the next iteration's work begins. A later pipeline stage first receives. Its timed step ends with
    the first receive of the next iteration, and lacks its own. Steps are alike, so what follows the optimizer from the
    first send or receive on is put in front.

    Args:
        launches: The table ``launches``.
        calls: The table ``calls``.
    """
    in_optimizer = np.flatnonzero((launches["phase"].astype(str) == "optimizer").to_numpy(bool))
    pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]
    rows = np.flatnonzero(launches["call"].isin(pairs["sequence"]).to_numpy(bool))
    after = rows[rows > in_optimizer[-1]] if len(in_optimizer) else rows[:0]
    if not len(after):
        return launches
    first = int(after[0])
    is_event = launches["what"].astype(str).isin([LAUNCH_KINDS[kind] for kind in EVENTS]).to_numpy(bool)
    while first and is_event[first - 1]:
        first -= 1
    order = np.roll(np.arange(len(launches)), len(launches) - first)
    return launches.iloc[order].reset_index(drop=True)


def num_stages_of(launches: pd.DataFrame, calls: pd.DataFrame, groups: pd.DataFrame) -> int:
    """Stages of the pipeline that a step belongs to: the size of the group that it sends on; 1 if it sends nothing.

    Args:
        launches: The table ``launches``.
        calls: The table ``calls``.
        groups: The table ``groups``.
    """
    pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]
    own = pairs[pairs["sequence"].isin(launches["call"])]["group"].unique()
    return int(groups["size"].to_numpy("i8")[own].max(initial=1))


def only_exchanges(launches: pd.DataFrame, calls: pd.DataFrame) -> Array:
    """Which rows are on streams that do nothing but send and receive.

    Args:
        launches: The table ``launches``.
        calls: The table ``calls``.
    """
    pairs = calls[calls["operation"].astype(str).str.startswith(("send", "recv"))]["sequence"]
    is_pair = launches["call"].isin(pairs).to_numpy(bool)
    has_work = (launches["work"] >= 0).to_numpy(bool)
    stream = launches["stream"].to_numpy("u8")
    return np.isin(stream, stream[is_pair]) & ~np.isin(stream, stream[has_work & ~is_pair])
