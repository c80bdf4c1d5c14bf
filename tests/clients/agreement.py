"""Whether the records of a run agree with the arithmetic that its entry writes down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tests.clients.catalogue import Arithmetic

_CATEGORIES = {"parameters": "parameter", "gradients": "gradient", "optimizer_states": "optimizer_state"}


def found_by(tables: dict[str, pd.DataFrame], summary: dict[str, Any]) -> dict[str, float]:
    """The memory and FLOPs of a run, by the names of :class:`Arithmetic`.

    ``tables`` are ``blocks`` and ``spans`` of the run directory, ``summary`` its ``--json``.
    """
    spans = tables["spans"]
    last = max((step["step"] for step in summary["steps"]), default=0)  # what tears down is counted a step too
    first = int(spans.loc[spans["step"] == last, "first_event"].min())
    blocks = tables["blocks"]
    held = {name: _most(blocks[blocks["category"] == value], first) for name, value in _CATEGORIES.items()}
    return held | {"flops": (summary["time"] or {}).get("flops", 0.0), "peak": summary["peak_allocated_bytes"]}


def disagreement(arithmetic: Arithmetic, found: dict[str, float], phases: Phases) -> str:
    """The first figure that is not what arithmetic says, or the phases of a step; empty where all agree."""
    within = {"flops": arithmetic.flops_within, "peak": arithmetic.peak_within}
    for name, value in found.items():
        wanted = getattr(arithmetic, name)
        allowed = within.get(name, arithmetic.bytes_within)
        if wanted is not None and abs(value - wanted) > allowed * wanted:
            return f"{name}: {value:,.0f}, by arithmetic {wanted:,.0f} (within {allowed:.1%})"
    return phases.wrong(arithmetic.phases)


@dataclass(frozen=True)
class Phases:
    """The phases of a run.

    Attributes:
        allocated: Those of each step, in the order in which they first allocated or freed.
        computed: Those of the step whose kernels were timed that had kernels.
    """

    allocated: dict[int, tuple[str, ...]]
    computed: frozenset[str]

    @classmethod
    def of(cls, spans: pd.DataFrame, summary: dict[str, Any]) -> Phases:
        """From the table ``spans`` and the run's ``--json``."""
        steps = spans[spans["step"] > 0].groupby("step")["phase"]
        times = (summary["time"] or {}).get("by_kind", {})
        return cls(
            {int(step): tuple(dict.fromkeys(ones)) for step, ones in steps},
            frozenset(name for name, time_us in times.items() if time_us > 0),
        )

    def wrong(self, wanted: tuple[str, ...]) -> str:
        """The first disagreement; a phase that allocates nothing is seen by its kernels alone."""
        if missing := [name for name in wanted if name not in self.computed]:
            return f"no kernel of the timed step ran in {', '.join(missing)}"
        for step, seen in self.allocated.items():
            ordered = [name for name in seen if name in wanted]
            if ordered != [name for name in wanted if name in ordered]:
                return f"step {step} has its phases in the order {', '.join(ordered)}"
        return ""


def _most(blocks: pd.DataFrame, first: int) -> int:
    """Most requested bytes that blocks held at once from that event on."""
    alive = blocks[blocks["free_event"] > first]
    events = np.concatenate([alive["alloc_event"].clip(lower=first), alive["free_event"]])
    changes = np.concatenate([alive["requested_bytes"], -alive["requested_bytes"]])
    # Of events of one number those that free come first: such blocks did not live together.
    order = np.lexsort((changes, events))
    return int(changes[order].cumsum().max(initial=0))
