"""The limits of a step side by side: how long it would be if all but one part took no time.

Each is a placement of the step's own launches in which everything else takes none. No change of other parts makes the
step shorter than that. A step is longer than its longest limit where parts wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.topology import read_groups
from fakedist.cost_model.hosts import scaled
from fakedist.cost_model.placing import StepLaunches
from fakedist.cost_model.step import PricedStep
from fakedist.rundir.step_time import StepLimit

#: Groups that have a limit of their own, those that take most, and rows of ``launches`` that they all place: the
#: largest steps have the first group's alone.
_MOST_GROUPS = 4
_MOST_ROWS = 2_000_000
#: What takes less than this share of the step limits nothing.
_LEAST = 1e-3


_Kind = Literal["kernels", "collectives", "nics"]


class _Part(NamedTuple):
    """Rows of ``launches``, and the 90 % interval of their time over the estimate."""

    kind: _Kind
    group: str
    num_nodes: int
    rows: npt.NDArray[np.bool_]
    low: float
    high: float


def find_limits(step: PricedStep, tables: Mapping[str, pd.DataFrame]) -> list[StepLimit]:
    """The limits of a priced step, the longest first; ``tables`` has its ``work``, ``calls`` and ``groups``."""
    prices, communication = step.price_list.work, step.communication
    own = StepLaunches(step.launches, tables["work"], prices, communication)
    # Without a host: what a tool measured of it is in the launches, the rest follows the host's costs.
    on_gpu = StepLaunches(step.launches.assign(host_us=0.0), tables["work"], prices, communication)
    no_host, nothing = scaled(step.host, 0.0), np.zeros(len(step.launches), bool)
    host_us = [own.place(scaled(step.host, factor), nothing).placed.end_us for factor in (1.0, *step.host.range)]
    limits = [StepLimit("host", "", 0, *host_us)]
    for part in _parts(step, tables, own.kernels_us):
        us = on_gpu.place(no_host, part.rows).placed.end_us
        limits.append(StepLimit(part.kind, part.group, part.num_nodes, us, us * part.low, us * part.high))
    return sorted((row for row in limits if row.step_us > _LEAST * step.step_us), key=lambda row: -row.step_us)


def _parts(step: PricedStep, tables: Mapping[str, pd.DataFrame], kernels_us: float) -> Iterator[_Part]:
    is_call = (step.launches["what"].astype(str) == "collective").to_numpy(bool)
    low, high = (bound / kernels_us if kernels_us and np.isfinite(bound) else 1.0 for bound in step.kernel_bounds_us)
    yield _Part("kernels", "", 0, ~is_call, low, high)
    if step.communication is None:
        return
    labels = np.array([group.label for group in read_groups(tables["groups"])], object)
    made_on = tables["calls"].set_index("sequence")["group"]
    calls = step.communication.calls.dropna(subset="time_us")
    calls = calls.assign(label=labels[made_on.reindex(calls.index).to_numpy("i8")])
    over_nodes = calls[calls["num_nodes"] > 1]
    of_nics = over_nodes.groupby("label")["time_us"].sum()
    by_group = sorted(calls.groupby("label", sort=False), key=lambda item: -item[1]["time_us"].sum())
    most = max(min(_MOST_ROWS // len(step.launches), _MOST_GROUPS), 1)
    parts: list[tuple[_Kind, str, pd.DataFrame]]
    parts = [("collectives", str(label), own) for label, own in by_group[:most]]
    if (of_nics > _LEAST * step.step_us).sum() > 1:
        parts.append(("nics", "", over_nodes))
    for kind, label, own in parts:
        if whole := float(own["time_us"].sum()):
            rows = is_call & step.launches["call"].isin(own.index).to_numpy(bool)
            num_nodes = int(own["num_nodes"].max()) if label else 0
            low, high = (float(own[name].sum()) / whole for name in ("low_us", "high_us"))
            yield _Part(kind, label, num_nodes, rows, low, high)
