"""Finds the blocks whose sizes follow how many tokens experts get.

Calls of one router differ in their counts, so one recording shows which sizes follow them: of the blocks that the same
line makes by the same operation, the sizes are ``base + per x count`` to the byte for one count of each call (what the
rank receives, what one expert gets, what one rank sends). Blocks of a backward belong to the call before the forward
operation whose node makes them. A line that runs once has one size: it follows a count if another line's blocks of the
same operation do, and its size is theirs for its own call. The scratch memory of a sort, which is rounded up, follows
the count that the sorted tensors do: what differs from the recorded count adds its multiple to the recorded size.
Blocks whose sizes vary otherwise are bounded from above: by a line over the tokens that are received if they nearly
follow these, else by the largest of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.blocks import Blocks
from fakedist.analysis.recording import Recording
from fakedist.analysis.topology import find_pipeline, read_groups
from fakedist.analysis.typed_tables import table_of
from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.table_rows import TABLES
from fakedist.units import parse_rank_list

Ints = npt.NDArray[np.int64]
#: Grouped products round the tokens of each expert up to a multiple of these, and reductions all of them.
_PADDINGS = (8, 16, 32, 64, 128)
#: Scratch memory is rounded by no more than this part of it.
_ROUNDED = 0.05
#: A line bounds sizes that vary otherwise if it leaves no more than this part of what the largest of them does.
_NEARER = 0.25
_RECEIVED = 0  # the column of Counts.of_rank with all that a rank receives


class FittedSizes(NamedTuple):
    """Sizes of blocks: ``base + per x count`` bytes, the column of the count (-1 for none), rows of bounded ones."""

    base: Ints
    per: Ints
    follows: Ints
    bounded: Ints


class Counts:
    """The counts that sizes may follow: tokens that a rank's experts get in each call of a router.

    Args:
        passes: The calls, each once.
        ranks: The ranks that exchange tokens: the first has the first experts, and so on.
    """

    def __init__(self, passes: list[RouterPass], ranks: tuple[int, ...]) -> None:
        self.passes, self.ranks = passes, ranks

    def sent(self, load: RouterLoad, ranks: tuple[int, ...] | None = None) -> Ints:
        """Tokens that each rank sends to each expert in each call, [calls, ranks, experts]."""
        return np.array([[load.counts(of, rank) for rank in ranks or self.ranks] for of in self.passes])

    @staticmethod
    def of_rank(sent: Ints, position: int) -> Ints:
        """The counts that may matter to the rank at a position in its group, [calls, counts].

        Received: all, by expert, from each rank, by both, and all with each expert's rounded up; sent to each rank;
        the most that a rank sends to an expert (a capacity that drops none); all and the most, rounded up.
        """
        calls, ranks, experts = sent.shape
        mine = sent.reshape(calls, ranks, ranks, experts // ranks)
        gets = mine[:, :, position]
        sends = mine[:, position].sum(2)
        by_expert = gets.sum(1)
        total = by_expert.sum(1, keepdims=True)
        most = sent.max(axis=(1, 2))[:, None]
        padded = [(-(-by_expert // step) * step).sum(1, keepdims=True) for step in _PADDINGS]
        every = (total, by_expert, gets.sum(2), sends, *padded, gets.reshape(calls, -1), most)
        every += tuple(-(-count // step) * step for count in (total, most) for step in _PADDINGS)
        return np.concatenate(every, axis=1)


def calls_of(recording: Recording, frame: pd.DataFrame, passes: list[RouterPass]) -> Ints:
    """The call of a router that each block, or launch, belongs to; -1 before the first one."""
    number = {(of.layer, of.number): n for n, of in enumerate(passes)}
    op = np.maximum.accumulate(frame["op"].to_numpy("i8")) if len(frame) else np.zeros(0, "i8")
    op = _forward_ops(recording, op)
    rows = recording.router_passes
    before = np.searchsorted([row.op for row in rows], op, side="right") - 1
    of_row = np.array([*(number[row.layer, row.number] for row in rows), -1])
    return of_row[before]


def _forward_ops(recording: Recording, op: Ints) -> Ints:
    """The operation of the forward that each operation of a backward belongs to, or one that repeats it after a router.

    What a backward computes again without its router (an activation, Megatron-core's ``moe_act``) belongs to the node
    that ran last, and the nodes that it makes to the same.
    """
    made = recording.made_by
    rows = np.array([row.op for row in recording.router_passes])
    in_backward, again = (
        np.isin(recording.op_scope, np.flatnonzero(is_one))
        for is_one in (
            [row.phase == "backward" for row in recording.scopes],
            [row.recompute for row in recording.scopes],
        )
    )
    is_first = np.append(True, np.diff(made["forward"]) != 0)[: len(made["op"])]
    began = made["op"][np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))]  # the node that runs it
    while len(made["op"]) and len(op) and len(in_backward):
        ran = np.clip(op, 0, len(in_backward) - 1)
        node = np.searchsorted(made["op"], op, side="right") - 1
        router = np.searchsorted(rows, op, side="right") - 1
        is_repeated = again[ran] & (router >= 0) & (rows[router] >= began[node])
        follows = (op >= 0) & in_backward[ran] & (node >= 0) & ~is_repeated & (made["forward"][node] < op)
        if not follows.any():
            break
        op = np.where(follows, made["forward"][node], op)
    return op


def fitted_sizes(frame: pd.DataFrame, call: Ints, mine: Ints, layer: Ints, *, bounds: bool = True) -> FittedSizes:
    """The sizes of blocks by columns of ``mine``. ``layer`` is that of each call.

    Without ``bounds``, those that vary otherwise keep their own sizes.
    """
    size = frame["requested_bytes"].to_numpy("i8")
    base = size.copy()
    per = np.zeros(len(size), "i8")
    follows = np.full(len(size), -1)
    fits: dict[tuple[str, str], set[tuple[int, int, int]]] = defaultdict(set)
    unexplained, constant = [], []
    kind = list(zip(frame["operation"].astype(str), frame["phase"].astype(str), strict=True))
    groups = list(_alike(frame, call))
    while groups:
        rows = groups.pop()
        if (size[rows] == size[rows[0]]).all():
            constant.append(rows)
        elif (fit := exact_fit(size[rows], mine[call[rows]])) is not None:
            base[rows], per[rows], follows[rows] = fit
            fits[kind[rows[0]]].add(fit)
        elif len(layers := np.unique(layer[call[rows]])) > 1:  # the first has no gradient of its input, for example
            groups += [rows[layer[call[rows]] == one] for one in layers]
        else:
            unexplained.append(rows)
    for rows in constant:  # such as those of a first call, which compiles what it runs
        for fit in fits[kind[rows[0]]]:
            if (fit[0] + fit[1] * mine[call[rows], fit[2]] == size[rows]).all():
                base[rows], per[rows], follows[rows] = fit
    unexplained = [
        rows
        for rows in unexplained
        if not _follows_nearly(size[rows], mine[call[rows]], fits[kind[rows[0]]], (base, per, follows), rows)
    ]
    if bounds:
        for rows in unexplained:
            base[rows], per[rows], follows[rows] = _bound(size[rows], mine[call[rows], _RECEIVED])
    return FittedSizes(base, per, follows, np.concatenate([*unexplained, np.zeros(0, "i8")]).astype("i8"))


def _bound(size: Ints, received: Ints) -> tuple[int, int, int]:
    """The least line over what is received that no size exceeds if it is near them, else the largest size."""
    largest = int(size.max())
    varies = received - received.mean()
    slope = int(np.ceil((varies * size).sum() / max((varies**2).sum(), 1)))
    base = int(max((size - slope * received).max(), 0))
    left = (base + slope * received - size).sum()
    return (base, slope, _RECEIVED) if slope > 0 and left <= _NEARER * (largest - size).sum() else (largest, 0, -1)


def _alike(frame: pd.DataFrame, call: Ints) -> Iterator[Ints]:
    """Rows of the blocks that are made alike in each call: by the same line, operation and turn."""
    of_calls = (call >= 0) & (frame["category"] != "workspace").to_numpy()
    alike = ["operation", "stack", "phase", "recompute"]
    keyed = frame.loc[of_calls, [*alike, "op"]].assign(call=call[of_calls], row=np.flatnonzero(of_calls))
    keyed["inner"] = keyed.groupby([*alike, "op"], observed=True).cumcount()
    # The turn of an operation among those alike of its call.
    keyed["turn"] = keyed.groupby([*alike, "call"], observed=True)["op"].rank("dense").astype("i8")
    for _, group in keyed.groupby([*alike, "inner", "turn"], observed=True, sort=False):
        yield group["row"].to_numpy()


def exact_fit(size: Ints, counts: Ints) -> tuple[int, int, int] | None:
    """``base``, ``per`` and the column of the counts by which every size is ``base + per x count``; None without any.

    Two sizes fit every line, so that a base needs a third.
    """
    other = int(np.argmax(size != size[0]))
    steps = counts[other] - counts[0]
    more = size[other] - size[0]
    exact = (steps != 0) & (more % np.where(steps == 0, 1, steps) == 0)
    per = np.where(exact, more // np.where(steps == 0, 1, steps), 0)
    base = size[0] - per * counts[0]
    fits = (per > 0) & (base >= 0) & ((base + per * counts) == size[:, None]).all(0)
    fits &= (base == 0) | (len(np.unique(size)) > 2)
    columns = np.flatnonzero(fits)
    if not len(columns):
        return None
    column = int(columns[np.argmin(base[columns] != 0)])
    return int(base[column]), int(per[column]), column


def _follows_nearly(
    size: Ints, counts: Ints, others: set[tuple[int, int, int]], to: tuple[Ints, Ints, Ints], rows: Ints
) -> bool:
    """Whether sizes are rounded ones that follow a count of others of their operation. Writes what they follow."""
    for column in sorted({column for _, _, column in others}):
        least, most = np.argmin(counts[:, column]), np.argmax(counts[:, column])
        steps = counts[most, column] - counts[least, column]
        slope = round((size[most] - size[least]) / steps) if steps else 0
        rest = size - slope * counts[:, column]
        if slope > 0 and rest.min() >= 0 and np.ptp(rest) <= _ROUNDED * size.min():
            for array, values in zip(to, (rest, slope, column), strict=True):
                array[rows] = values
            return True
    return False


#: Operations by which ranks exchange tokens.
EXCHANGES = ("all_to_all", "deep_ep", "hybrid_ep_dispatch", "hybrid_ep_combine")


def routed_table(
    recording: Recording, blocks: Blocks, tables: Mapping[str, pd.DataFrame], job: Job | None
) -> pd.DataFrame:
    """The table ``routed``, of a run's ``launches``, ``work``, ``calls`` and ``groups``.

    With even loads, nothing shows which kernels follow tokens but grouped products and what exchanges them.
    """
    passes = passes_of(recording)
    facts = None if recording.routers is None else recording.routers.facts
    launches, work, calls = (tables[name] for name in ("launches", "work", "calls"))
    if facts is None or job is None or not passes or not len(launches):
        return table_of("routed")
    call = calls_of(recording, launches, passes)
    of_work = launches["work"].to_numpy("i8")
    groups, k = (np.append(work[name].to_numpy("i8"), 0)[of_work] for name in ("groups", "k"))
    even = np.array([of.tokens * of.top_k for of in passes])
    received = even
    rows = np.zeros(len(call), bool)
    sums = np.zeros(len(call), bool)
    ops = np.zeros(0, "i8")
    is_alike = len({of.num_experts for of in passes}) == 1
    own = tuple(facts.ranks) if is_alike else ()
    load = RouterLoad(facts.load, job.seed)
    if own:
        counts = Counts(passes, own)
        mine = counts.of_rank(counts.sent(load), own.index(job.rank))
        received = mine[:, 0]
        by_expert = mine[:, 1 : 1 + passes[0].num_experts // len(own)]
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
    part = calls["largest_part_bytes"]
    number = calls["group"].to_numpy("i8")
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
