"""Advised changes as switches of the page: the blocks that each change saves, for a replay of any of them together.

A browser replays them as :meth:`fakedist.analysis.evidence.Evidence.saved` does, over *points*: the moves of the
timeline, and the events between two moves at which a change begins or ends. Sums are in the same order, so they are
equal to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.advice import RULES, advice_of
from fakedist.analysis.evidence import Change, Evidence, Saving
from fakedist.analysis.recording import Array
from fakedist.report.figures.memory_figures import MemoryCurve
from fakedist.report.page.drawings import Pack
from fakedist.results.replayed import evidence_of, room_of_run
from fakedist.results.run import Run
from fakedist.rundir.summary import Advice


@dataclass(frozen=True)
class Switch:
    """One advised change, and what it does by itself. ``change`` is None if it moves no block."""

    advice: Advice
    change: Change | None

    @property
    def subjects(self) -> list[str]:
        """Of switches that share a subject only one can be on."""
        return sorted((self.change.subjects if self.change else ()) or {self.advice.rule})

    @property
    def savings(self) -> list[Saving]:
        """The least and the most that it saves; one if both are the same, none if it moves no block."""
        if self.change is None:
            return []
        return [self.change.most] if self.change.least is None else [self.change.least, self.change.most]


def find_switches(run: Run) -> tuple[Evidence | None, list[Switch]]:
    """The advised changes that the run's tables still show, in the order of their rules, and what the tables show."""
    summary = run.summary
    advised = {advice.title: advice for advice in summary.advice}
    wanted = {*advised, *(summary.remedy.titles if summary.remedy else ())}
    evidence, room = evidence_of(run) if wanted else None, room_of_run(run)
    if evidence is None:
        return None, []
    changes = [change for rule in RULES for change in rule(evidence) if change.title in wanted]
    switches = [
        Switch(advised.get(change.title) or advice_of(evidence, room, change, evidence.saved([change])), change)
        for change in changes
    ]
    reserved = [advice for advice in summary.advice if advice.of == "peak_reserved_bytes"]
    return evidence, [*switches, *(Switch(advice, None) for advice in reserved)]


def add_switches(pack: Pack, run: Run, curve: MemoryCurve) -> list[Switch]:
    """Add the switches, and the blocks that each saves; returns them in order of their numbers."""
    evidence, switches = find_switches(run)
    if evidence is None or not switches:
        return []
    cuts = [_cuts(evidence, saving) for switch in switches for saving in switch.savings]
    every = pd.concat([_NO_CUTS, *cuts], ignore_index=True)
    inner = np.unique(np.concatenate([every["start"].to_numpy("i8"), every["end"].to_numpy("i8")]))
    inner = np.setdiff1d(inner[inner < len(evidence.allocated)], curve.events)
    points = np.sort(np.concatenate([curve.events, inner]))
    pack.add("inner_move", np.searchsorted(curve.events, inner))
    values, indices = np.unique(every["bytes"].to_numpy("f8"), return_inverse=True)
    # Blocks of a saving ascend. A block that is gone for all its life has no points.
    steps = [np.diff(cut["block"].to_numpy("i8"), prepend=0) for cut in cuts]
    pack.add("cut_block", np.concatenate([np.zeros(0, "i8"), *steps]))
    for name in ("start", "end"):
        point = np.searchsorted(points, every[name].to_numpy("i8"))
        pack.add(f"cut_{name}", np.where(every["is_life"].to_numpy(bool), 0, point))
    pack.add("cut_value", indices)
    pack.add("cut_values", values)
    lengths = iter([len(cut) for cut in cuts])
    pack.meta["switches"] = [_described(switch, [next(lengths) for _ in switch.savings]) for switch in switches]
    room = room_of_run(run)
    pack.meta["room"] = {
        "low": room.low_bytes,
        "high": room.high_bytes,
        "stepUs": room.step_us,
        "reserved": evidence.reserved_peak,
        "rounding": evidence.rounding,
    }
    return switches


def _described(switch: Switch, num_cuts: list[int]) -> dict[str, object]:
    advice = switch.advice
    return {
        "title": advice.title,
        "rule": advice.rule,
        "subjects": switch.subjects,
        "priceUs": None if advice.price_us is None else [advice.price_us, advice.price_high_us or advice.price_us],
        "spentOn": advice.spent_on,
        "num": num_cuts,
        "hasOtherBlocks": switch.change is not None and switch.change.has_other_blocks,
    }


_NO_CUTS = pd.DataFrame({"block": [], "bytes": [], "start": [], "end": [], "is_life": []})


def _cuts(evidence: Evidence, saving: Saving) -> pd.DataFrame:
    """The blocks that are saved: bytes, first event, end, and whether that is all of the block's life."""
    made, freed = (evidence.blocks[name].to_numpy("i8") for name in ("alloc_event", "free_event"))
    gone = np.asarray(saving.bytes_)
    start: Array = made if saving.starts is None else np.asarray(saving.starts, "i8")
    end: Array = freed if saving.ends is None else np.asarray(saving.ends, "i8")
    is_life = (gone > 0) & (start <= made) & (end >= freed)
    rows = np.flatnonzero((gone != 0) & (is_life | (start < end)))
    columns = {"block": rows, "bytes": gone[rows], "start": start[rows], "end": end[rows], "is_life": is_life[rows]}
    return pd.DataFrame(columns)
