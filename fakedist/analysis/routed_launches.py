"""Finds the launches of the timed step that follow how many tokens experts get, and the ranks that exchange these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.axes import find_pipeline
from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Recording
from fakedist.analysis.routed_blocks import Counts, calls_of, fitted_sizes
from fakedist.analysis.topology import read_groups
from fakedist.analysis.typed_tables import table_of
from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.rank_list import parse_rank_list
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.table_rows import TABLES

Ints = npt.NDArray[np.int64]
#: Operations by which ranks exchange tokens.
EXCHANGES = ("all_to_all", "deep_ep", "hybrid_ep_dispatch", "hybrid_ep_combine")


def routed_table(
    recording: Recording, blocks: Blocks, tables: Mapping[str, pd.DataFrame], job: Job | None
) -> pd.DataFrame:
    """The table ``routed``, of a run's ``launches``, ``work``, ``calls`` and ``groups``.

    With even loads, nothing shows which kernels follow tokens but grouped products and what exchanges them.
    """
    passes, facts = passes_of(recording), None if recording.routers is None else recording.routers.facts
    launches, work, calls = (tables[name] for name in ("launches", "work", "calls"))
    if facts is None or job is None or not passes or not len(launches):
        return table_of("routed")
    call, of_work = calls_of(recording, launches, passes), launches["work"].to_numpy("i8")
    groups, k = (np.append(work[name].to_numpy("i8"), 0)[of_work] for name in ("groups", "k"))
    even = np.array([of.tokens * of.top_k for of in passes])
    received, rows, sums, ops = even, np.zeros(len(call), bool), np.zeros(len(call), bool), np.zeros(0, "i8")
    is_alike = len({of.num_experts for of in passes}) == 1
    own, load = tuple(facts.ranks) if is_alike else (), RouterLoad(facts.load, job.seed)
    if own:
        counts = Counts(passes, own)
        mine = counts.of_rank(counts.sent(load), own.index(job.rank))
        received, by_expert = mine[:, 0], mine[:, 1 : 1 + passes[0].num_experts // len(own)]
        frame = blocks.frame
        fits = fitted_sizes(frame, calls_of(recording, frame, passes), mine, layers_of(passes), bounds=False)
        ops = frame["op"].to_numpy()[fits.follows >= 0]
        m = np.append(work["m"].to_numpy("i8"), 0)[of_work]
        rows, sums = ((groups == 0) & (size > 0) & (by_expert[call] == size[:, None]).any(axis=1) for size in (m, k))
        sums &= ~rows
    # Gradients of weights are as large as the weights. They sum over the tokens, of one expert or all.
    sums |= (groups > 0) & (abs(k * groups - received[call]) <= groups)
    follows = (of_work >= 0) & (launches["call"] < 0) & ((groups > 0) | rows | sums | np.isin(launches["op"], ops))
    exchanges = calls.loc[_is_exchange(calls, tables["groups"], own), "sequence"]
    launch = np.flatnonzero((call >= 0) & (follows | launches["call"].isin(exchanges)))
    used, of_used = np.unique(call[launch], return_inverse=True)
    of_stage = groups_of_stage(tables["groups"], calls, job.rank, own)
    timed = [passes[number] for number in used.tolist()]
    busiest = busiest_tokens(timed, load, of_stage) if own else received[used]
    named = pd.DataFrame(timed, columns=list(RouterPass._fields)).iloc[of_used].reset_index(drop=True)
    named = named.assign(launch=launch, sums=sums[launch], received=received[call[launch]], busiest=busiest[of_used])
    return named[TABLES["routed"].names]


def _is_exchange(calls: pd.DataFrame, groups: pd.DataFrame, own: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Whether calls send tokens to experts; ``own`` are the ranks that are known to exchange these."""
    members = [set(parse_rank_list(str(text))) if text else set() for text in groups["ranks"]]
    is_own = np.array([not own or ranks <= set(own) or set(own) <= ranks for ranks in members], bool)
    # No router sends all of it to one of several other ranks: ring attention passes its keys on.
    part, number = calls["largest_part_bytes"], calls["group"].to_numpy("i8")
    passes_on = (part > 0) & (part == calls["exchanged_bytes"]) & (groups["size"].to_numpy("i8")[number] > 2)
    is_exchange = calls["operation"].astype(str).str.startswith(EXCHANGES) & ~passes_on
    found: npt.NDArray[np.bool_] = is_exchange.to_numpy(bool) & is_own[number]
    return found


def passes_of(recording: Recording) -> list[RouterPass]:
    """The calls of its routers, each once."""
    return list(dict.fromkeys(RouterPass(*row[1:]) for row in recording.router_passes))


def layers_of(passes: Sequence[RouterPass]) -> Ints:
    """The layer of each call."""
    return np.array([of.layer for of in passes])


def received_tokens(sent: Ints) -> Ints:
    """Tokens that each rank of a group receives in each call, [calls, ranks]; ``sent`` is :meth:`Counts.sent`."""
    calls, ranks, experts = sent.shape
    received: Ints = sent.reshape(calls, ranks, ranks, experts // ranks).sum(axis=(1, 3))
    return received


def busiest_tokens(passes: Sequence[RouterPass], load: RouterLoad, groups: Sequence[tuple[int, ...]]) -> Ints:
    """Tokens that the busiest rank of all groups receives in each call, [calls]."""
    most = np.array([of.tokens * of.top_k if load.is_even else 0 for of in passes], np.int64)
    for ranks in () if load.is_even else groups:
        received = received_tokens(Counts(list(passes), ranks).sent(load)) if passes else np.zeros((0, 1), np.int64)
        most = np.maximum(most, received.max(axis=1))
    return most


def groups_of_stage(
    groups: pd.DataFrame, calls: pd.DataFrame, rank: int, own: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """The groups of a rank's pipeline stage that exchange tokens as its ``own`` does, which is the first.

    The smallest group around it, in one pipeline stage, consists of them. ``groups`` and ``calls`` are the tables.
    """
    try:
        pipeline = find_pipeline(groups, calls, rank)
    except JobError:  # several groups could be it
        return (own,)
    stages = set() if pipeline is None else set(pipeline.ranks)
    for ranks in sorted((parse_rank_list(group.ranks) for group in read_groups(groups) if group.ranks), key=len):
        number, more = divmod(len(ranks), max(len(own), 1))
        if more or number < 2 or not set(own) < set(ranks) or len(stages & set(ranks)) > 1:
            continue
        in_a_row = [ranks[n * len(own) : (n + 1) * len(own)] for n in range(number)]
        for parts in (in_a_row, [ranks[n::number] for n in range(number)]):
            if own in parts:
                return (own, *(part for part in parts if part != own))
    return (own,)
