"""The busiest rank sets the pace: what follows the tokens of experts takes as long as on the rank that gets the most in
each call of a router, because all others wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.routed_blocks import EXCHANGES, busiest_tokens, groups_of_stage
from fakedist.errors import JobError
from fakedist.options.expert_loads import EVEN
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.summary import RouterLoadFacts


@dataclass(frozen=True)
class ExpertsLoad:
    """Tokens that experts got where a virtual run made up the routing.

    Attributes:
        load: As ``--router-load`` gives it.
        busiest: What the busiest rank of each call gets, in times the mean.
        is_recorded: Whether the run had this load. Otherwise it is for the time alone.
        seed: Of the draws.
        rank: The recorded rank.
        ranks: Ranks that exchange tokens.
    """

    load: str = EVEN
    busiest: float = 1.0
    is_recorded: bool = True
    seed: int = 0
    rank: int = 0
    ranks: tuple[int, ...] = ()


def recorded_load(facts: RouterLoadFacts) -> ExpertsLoad:
    """The load that a rank recorded."""
    return ExpertsLoad(facts.load, facts.busiest())


def scale_to_busiest_rank(tables: Mapping[str, pd.DataFrame], experts: ExpertsLoad) -> dict[str, pd.DataFrame]:
    """The tables of a step (``launches``, ``work``, ``calls``, ``routed``, and others) at the busiest rank's pace.

    Rows of ``work`` that follow tokens come again at the end, ``pace`` (a new column) times as much of them.
    A load that was not recorded is drawn for the calls of routers, of which ``groups`` says who exchanges tokens.

    Raises:
        JobError: It is for a load that was not recorded, and nothing is known to follow the tokens.
    """
    routed = tables.get("routed")
    if routed is None or not len(routed):
        if not experts.is_recorded:
            raise JobError(
                f"--router-load {experts.load}: no launch of the run is known to follow the tokens of experts",
                "record it with --router-load",
            )
        return dict(tables)
    if not experts.is_recorded:
        routed = routed.assign(busiest=_drawn(tables, routed, experts))
    launches, calls = tables["launches"], tables["calls"]
    pace = (routed["busiest"] / routed["received"].clip(lower=1)).to_numpy("f8")
    if (pace == 1).all():
        return dict(tables)
    call = launches["call"].to_numpy("i8")[routed["launch"]]
    of_call = dict(zip(call[call >= 0].tolist(), pace[call >= 0].tolist(), strict=True))
    is_exchange = calls["operation"].astype(str).str.startswith(EXCHANGES)
    stretched = np.where(is_exchange, calls["sequence"].map(of_call).fillna(1.0), 1.0)
    sizes = [name for name in ("bytes_in", "bytes_out", "largest_part_bytes", "exchanged_bytes") if name in calls]
    return {
        **tables,
        **_work_at_pace(launches, tables["work"], routed[call < 0], pace[call < 0]),
        "calls": calls.assign(**{name: (calls[name] * stretched).round().astype("i8") for name in sizes}),
    }


def _work_at_pace(
    launches: pd.DataFrame, work: pd.DataFrame, routed: pd.DataFrame, pace: npt.NDArray[np.float64]
) -> dict[str, pd.DataFrame]:
    launch = routed["launch"].to_numpy("i8")
    of_work = launches["work"].to_numpy("i8", copy=True)
    key = np.stack([of_work[launch], routed["sums"].to_numpy("i8"), pace.view("i8")], axis=1)
    pairs, row = np.unique(key, axis=0, return_inverse=True)
    more = work.iloc[pairs[:, 0]].copy()
    factor = pairs[:, 2].copy().view("f8")
    over = pairs[:, 1].astype(bool)
    for name, is_scaled in (("m", ~over), ("k", over)):
        more[name] = more[name].where(~is_scaled, (more[name] * factor).round().astype("i8"))
    more = more.assign(flops=more["flops"] * factor, moved_bytes=more["moved_bytes"] * factor, pace=factor)
    of_work[launch] = len(work) + row.ravel()
    return {
        "launches": launches.assign(work=of_work.astype("i4")),
        "work": pd.concat([work.assign(pace=1.0), more.astype(work.dtypes)], ignore_index=True),
    }


def own_work(work: pd.DataFrame, name: str) -> npt.NDArray[np.float64]:
    """A column of the table ``work`` in proportion to tokens, as recorded: not at the busiest rank's pace."""
    values = work[name].to_numpy("f8")
    return values / work["pace"].to_numpy("f8") if "pace" in work else values


def _drawn(tables: Mapping[str, pd.DataFrame], routed: pd.DataFrame, experts: ExpertsLoad) -> npt.NDArray[np.int64]:
    """Tokens of the busiest rank by another load in the call of each row of ``routed``."""
    rows = list(routed[list(RouterPass._fields)].itertuples(index=False, name=None))
    passes = [RouterPass(*row) for row in dict.fromkeys(rows)]
    groups = groups_of_stage(tables["groups"], tables["calls"], experts.rank, experts.ranks)
    busiest = dict(zip(passes, busiest_tokens(passes, RouterLoad(experts.load, experts.seed), groups), strict=True))
    return np.array([busiest[RouterPass(*row)] for row in rows])
