"""Advice that would lower the peak. Each figure comes from the run's own history without the blocks a change saves.

Every figure is estimated. A rule without a worthwhile saving gives no advice. The need after a change, what stays
reserved once the allocator has freed its caches, lies between the allocated peak without those blocks and that peak
with all that is reserved but not allocated in this run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice

import numpy as np
import pandas as pd

from fakedist.analysis.activation_advice import checkpoint_layers, chunk_loss, halve_micro_batch
from fakedist.analysis.evidence import ANYWHERE, UNKNOWN, Change, Evidence, Price, Room, Saving, Setup
from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.parallel_advice import alternate
from fakedist.analysis.state_advice import drop_gradients, fuse_optimizer, reshard, shard_replicas
from fakedist.rundir.notes import listed
from fakedist.rundir.summary import Advice, Remedy
from fakedist.units import format_bytes

MIN_SHARE = 0.01  # of the peak, and of the GPU's memory; a smaller saving is not worth a change
MIN_BYTES = 1 << 20
_MOST_CHANGES = 3  # together
_MOST_EVENTS = 300_000_000  # replayed in a search: some seconds
_LEAST_PRICE = 0.01  # of the step: a lower price is as good as none
_LEAST_UNUSED = 0.05  # of reserved
_OUTCOMES = ("fits", "may fit", "does not fit", "")  # in the order of advice

RULES: tuple[Callable[[Evidence], Iterator[Change]], ...] = (
    checkpoint_layers,
    halve_micro_batch,
    alternate,
    shard_replicas,
    reshard,
    chunk_loss,
    fuse_optimizer,
    drop_gradients,
)


def find_advice(
    tables: dict[str, pd.DataFrame], folds: list[Fold], room: Room = ANYWHERE, setup: Setup = UNKNOWN
) -> tuple[list[Advice], Remedy | None]:
    """Advice for a run, most bytes for its price first, those of which only a limit is known last; and a remedy.

    The remedy is the fewest changes after which the rank fits, of these the cheapest; None if it fits already, or if
    nothing that is known is enough. Of a rank that does not fit, its changes come first, then those that fit alone,
    then those that may.
    """
    if not len(tables["blocks"]):
        return [], None
    evidence = Evidence(tables, folds, setup)
    worth = max(MIN_BYTES, MIN_SHARE * max(evidence.peak, room.capacity_bytes))
    # One that gives nothing by itself may uncover another.
    changes = {change: evidence.saved([change]) for rule in RULES for change in rule(evidence)}
    segments = expandable_segments(evidence)
    advices = [
        advice_of(evidence, room, change, gives)
        for change, gives in changes.items()
        if gives[1] >= worth + (change.least is not None) * evidence.rounding and not change.is_variant
    ]
    if segments is not None and evidence.reserved_peak - evidence.kept_peak >= worth:
        advices.append(_of_reserved(evidence, room, segments))
    remedy = None
    if room.fits(evidence.reserved_peak, evidence.reserved_peak) == "does not fit":
        remedy = _remedy(evidence, room, changes, segments)
    first = set() if remedy is None else set(remedy.titles)
    missing = first - {advice.title for advice in advices}
    advices += [
        advice_of(evidence, room, change, gives) for change, gives in changes.items() if change.title in missing
    ]
    advices.sort(
        key=lambda advice: (
            advice.title not in first,
            _OUTCOMES.index(advice.fits),
            advice.is_upper_bound,
            -_value(advice, room),
        )
    )
    return advices, remedy


def _value(advice: Advice, room: Room) -> float:
    """Bytes for the price; bytes alone if no step was timed. A price that is not known counts as the whole step."""
    if not room.step_us:
        return advice.gives_bytes
    price_us = room.step_us if advice.price_high_us is None else advice.price_high_us
    return advice.gives_bytes / (price_us + _LEAST_PRICE * room.step_us)


def advice_of(evidence: Evidence, room: Room, change: Change, gives: tuple[int, int]) -> Advice:
    """A change by itself, which lowers the peak by ``gives``, at least and at most."""
    low, high = evidence.needed_without(*gives)
    price = change.price
    return Advice(
        change.rule,
        change.title,
        change.text,
        gives[1],
        gives_low_bytes=gives[0],
        line=change.line,
        needs_low_bytes=low,
        needs_high_bytes=high,
        fits=room.fits(low, high),
        price_us=None if price is None else price.low_us,
        price_high_us=None if price is None else price.high_us,
        spent_on="" if price is None else price.spent_on,
        step_share=None if price is None else room.share(price.low_us),
        step_share_high=None if price is None else room.share(price.high_us),
    )


def _remedy(
    evidence: Evidence, room: Room, changes: dict[Change, tuple[int, int]], segments: Change | None
) -> Remedy | None:
    """The fewest changes that surely fit, else the fewest that may; of as many, the cheapest of which most is known."""
    best: dict[str, Remedy] = {}
    if segments is not None:
        alone = _tried(evidence, room, [segments], (0, 0))
        best[alone.fits] = alone
    gone = {change: evidence.gone_at_samples(change.most) for change in changes}
    for number in range(1, _MOST_CHANGES + 1):
        ways = []
        for some in combinations(changes, number):
            needed = evidence.least_needed([gone[change] for change in some])
            if are_compatible(some) and room.fits(needed, needed) != "does not fit":
                unpriced = sum(change.price is None for change in some)
                price_us = sum(change.price.high_us for change in some if change.price is not None)
                ways.append(((unpriced, price_us), some))
        for _, some in islice(sorted(ways, key=lambda way: way[0]), most_replays(evidence)):
            tried = _tried(evidence, room, some, changes[some[0]] if number == 1 else evidence.saved(some))
            best.setdefault(tried.fits, tried)
            if "fits" in best:
                return best["fits"]
    return best.get("may fit")


def most_replays(evidence: Evidence) -> int:
    """Replays of a run that a search has time for: some seconds."""
    return max(_MOST_EVENTS // max(len(evidence.allocated), 1), 1)


def are_compatible(changes: Sequence[Change]) -> bool:
    """Whether changes can be made together: no two of them are about one subject."""
    subjects = [subject for change in changes for subject in change.subjects or {change.rule}]
    return len(set(subjects)) == len(subjects)


def _tried(evidence: Evidence, room: Room, changes: Sequence[Change], gives: tuple[int, int]) -> Remedy:
    low, high = evidence.needed_without(*gives)
    prices = [change.price or Price(0.0, 0.0, "") for change in changes]
    low_us, high_us = sum(price.low_us for price in prices), sum(price.high_us for price in prices)
    return Remedy(
        rules=[change.rule for change in changes],
        titles=[change.title for change in changes],
        gives_bytes=gives[1],
        gives_low_bytes=gives[0],
        needs_low_bytes=low,
        needs_high_bytes=high,
        fits=room.fits(low, high),
        price_us=low_us,
        price_high_us=high_us,
        spent_on=listed([*dict.fromkeys(price.spent_on for price in prices if price.spent_on)]),
        step_share=room.share(low_us),
        step_share_high=room.share(high_us),
        unpriced=[change.rule for change in changes if change.price is None],
    )


def expandable_segments(evidence: Evidence) -> Change | None:
    """Reserved memory that the allocator cannot use because its free blocks have the wrong sizes.

    No block goes, so that a replay says nothing of it: the need lies between what is in blocks and what is reserved.
    """
    if evidence.grows or evidence.reserved_peak - evidence.kept_peak < _LEAST_UNUSED * evidence.reserved_peak:
        return None
    held = "allocated" if evidence.kept_peak == evidence.peak else "in blocks"
    return Change(
        "expandable-segments",
        "use expandable segments",
        f"at most {format_bytes(evidence.kept_peak)} was {held} at once, but {format_bytes(evidence.reserved_peak)} "
        "was reserved; PYTORCH_ALLOC_CONF=expandable_segments:True saves up to the difference",
        Saving(np.zeros(len(evidence.blocks))),
        price=Price(0.0, 0.0, ""),
    )


def _of_reserved(evidence: Evidence, room: Room, segments: Change) -> Advice:
    low, high = evidence.kept_peak, evidence.reserved_peak
    return Advice(
        segments.rule,
        segments.title,
        segments.text,
        high - low,
        "peak_reserved_bytes",
        is_upper_bound=True,
        needs_low_bytes=low,
        needs_high_bytes=high,
        fits=room.fits(low, high),
    )
