"""Advice that would lower the peak. Each figure comes from the run's own history without the blocks a change saves.

Every figure is estimated. A rule without a worthwhile saving gives no advice. The need after a change, what stays
reserved once the allocator has freed its caches, lies between the allocated peak without those blocks and that peak
with all that is reserved but not allocated in this run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Literal

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import Fold
from fakedist.analysis.recording import Array
from fakedist.rundir.summary import Advice, Remedy
from fakedist.units import format_bytes

MIN_SHARE = 0.01  # of the peak; a smaller saving is not worth a change
MIN_BYTES = 1 << 20
_LOSS_PIECES = 8
_LOSS = r"log_softmax|nll_loss|cross_entropy"
_NUM_CHECKPOINTS = 2  # at most this many stacks of layers get advice
_EVERY = {2: "every second layer of ", 4: "every fourth layer of "}  # further ways to checkpoint a stack
_MOST_CHANGES = 3  # together
_MOST_EVENTS = 300_000_000  # replayed in a search: some seconds

Fits = Literal["fits", "may fit", "does not fit", ""]


@dataclass(frozen=True, eq=False)
class Change:
    """Blocks that a change saves: for each block of the run the bytes, and the events between which they are gone.

    ``starts`` and ``ends`` default to all of their lifetimes. Of changes with one ``subject`` only one can be made.
    ``price_us`` is what the step takes longer; None if that is not known.
    """

    rule: str
    title: str
    text: str
    bytes_: Array
    starts: Array | None = None
    ends: Array | None = None
    line: str = ""
    subject: str = ""
    price_us: float | None = None
    is_variant: bool = False


@dataclass(frozen=True)
class Room:
    """The memory that the rank may reserve, and how long its step is.

    ``low_bytes`` is left if NCCL and the CUDA context take the most that they may, ``high_bytes`` if the least; None if
    the GPU's memory is not known, or the run ended before its peak. ``step_us`` is None if no step was timed.
    """

    low_bytes: int | None = None
    high_bytes: int | None = None
    step_us: float | None = None

    def fits(self, low_bytes: int, high_bytes: int) -> Fits:
        """Whether something between these would fit."""
        if self.low_bytes is None or self.high_bytes is None:
            return ""
        return "fits" if high_bytes <= self.low_bytes else "may fit" if low_bytes <= self.high_bytes else "does not fit"

    def share(self, price_us: float | None) -> float | None:
        """A price as a share of the step."""
        return price_us / self.step_us if price_us is not None and self.step_us else None


_ANYWHERE = Room()


class Evidence:
    """The tables of a run, in the form that the rules use."""

    def __init__(self, tables: dict[str, pd.DataFrame], folds: list[Fold]) -> None:
        self.folds = folds
        self.blocks, self.layers = tables["blocks"], tables["layers"]
        self.spans, self.calls, self.groups = tables["spans"], tables["calls"], tables["groups"]
        self.grows = _is(tables["events"]["action"], lambda name: name == "segment_map").any()
        self.allocated = tables["events"]["allocated_bytes"].to_numpy()
        self.reserved_peak = int(tables["events"]["reserved_bytes"].max()) if len(self.allocated) else 0
        self.peak = int(self.allocated.max(initial=0))
        self.times = tables.get("layer_times")
        self.lines = [*map(str, tables["stacks"]["line"]), ""]  # stack -1 (none) indexes the empty line at the end

    def saved(self, changes: Sequence[Change]) -> int:
        """Bytes by which the peak falls with these changes. A block that two of them save goes with the first."""
        num_events = len(self.allocated)
        change, is_gone = np.zeros(num_events + 1), np.zeros(len(self.blocks), bool)
        for each in changes:
            first = self.blocks["alloc_event"].to_numpy() if each.starts is None else each.starts
            end = self.blocks["free_event"].to_numpy() if each.ends is None else each.ends
            gone = np.where((first < end) & ~is_gone, each.bytes_, 0)
            is_gone |= gone > 0
            change += np.bincount(first, gone, num_events + 1) - np.bincount(end, gone, num_events + 1)
        return self.peak - int((self.allocated - np.cumsum(change)[:num_events]).max(initial=0))

    def needed_without(self, gives: int) -> tuple[int, int]:
        """The least and most that the rank would need reserved if the allocated peak fell by so many bytes."""
        low = self.peak - gives
        return low, low + max(self.reserved_peak - self.peak, 0)

    def forward_us(self, layers: Array) -> float | None:
        """The time of layers' own kernels in forward, in the timed step; None without one."""
        if self.times is None or len(self.times) != len(self.layers):
            return None
        return float(self.times["forward_us"].to_numpy()[layers].sum())

    def category(self, wanted: str) -> Array:
        """Mask of the blocks of a category."""
        return _is(self.blocks["category"], lambda name: name == wanted)

    def operation(self, pattern: str) -> Array:
        """Mask of the blocks allocated by an operation whose name matches the pattern."""
        matcher = re.compile(pattern)
        return _is(self.blocks["operation"], lambda name: matcher.search(name) is not None)

    def at_peak(self, chosen: Array) -> int:
        """Bytes of the chosen blocks that are alive at the peak."""
        return int(self.blocks.loc[chosen & self.blocks["at_peak"].to_numpy(), "bytes"].sum())

    def main_line(self, chosen: Array) -> str:
        """The line that allocated most of the chosen blocks alive at the peak; empty if none of them has a line."""
        alive = self.blocks[chosen & self.blocks["at_peak"].to_numpy()]
        lines = pd.Series(self.lines).iloc[alive["stack"].to_numpy()]
        held = alive["bytes"].groupby(lines.to_numpy()).sum().drop("", errors="ignore")
        return str(held.idxmax()) if len(held) else ""


def _is(values: pd.Series, test: Callable[[str], bool]) -> Array:
    """Values that pass the test, which runs once per distinct value, since there are millions of blocks."""
    categories = values.astype("category").cat
    return np.array([*map(test, categories.categories.astype(str)), False], bool)[categories.codes.to_numpy()]


def find_advice(
    tables: dict[str, pd.DataFrame], folds: list[Fold], room: Room = _ANYWHERE
) -> tuple[list[Advice], Remedy | None]:
    """Advice for a run, largest saving first, those of which only a limit is known last; and what makes it fit.

    The remedy is the fewest changes after which the rank fits, of these the cheapest; None if it fits already, or if
    nothing that is known is enough.
    """
    if not len(tables["blocks"]):
        return [], None
    evidence = Evidence(tables, folds)
    worth = max(MIN_BYTES, MIN_SHARE * evidence.peak)
    # One that gives nothing by itself may uncover another.
    changes = {change: evidence.saved([change]) for rule in RULES for change in rule(evidence)}
    advices = [
        _advice(evidence, room, change, gives)
        for change, gives in changes.items()
        if gives >= worth and not change.is_variant
    ]
    advices += [advice for advice in _expandable_segments(evidence, room) if advice.gives_bytes >= worth]
    advices.sort(key=lambda advice: (advice.is_upper_bound, -advice.gives_bytes))
    is_full = room.fits(evidence.reserved_peak, evidence.reserved_peak) == "does not fit"
    return advices, _remedy(evidence, room, changes) if is_full else None


def _advice(evidence: Evidence, room: Room, change: Change, gives: int) -> Advice:
    low, high = evidence.needed_without(gives)
    return Advice(
        change.rule,
        change.title,
        change.text,
        gives,
        line=change.line,
        needs_low_bytes=low,
        needs_high_bytes=high,
        fits=room.fits(low, high),
        price_us=change.price_us,
        step_share=room.share(change.price_us),
    )


def _remedy(evidence: Evidence, room: Room, changes: dict[Change, int]) -> Remedy | None:
    """The fewest changes that surely fit, else the fewest that may; of as many, the cheapest of which most is known."""
    num_replays = max(_MOST_EVENTS // max(len(evidence.allocated), 1), 1)
    best: dict[str, Remedy] = {}
    for number in range(1, _MOST_CHANGES + 1):
        ways = []
        for some in islice(combinations(changes, number), num_replays):
            if len({change.subject or change.rule for change in some}) < number:
                continue
            gives = changes[some[0]] if number == 1 else evidence.saved(some)
            ways.append(_tried(evidence, room, some, gives))
        ways.sort(key=lambda way: (len(way.unpriced), way.price_us, -way.gives_bytes))
        for way in ways:
            best.setdefault(way.fits, way)
        if "fits" in best:
            break
    return best.get("fits") or best.get("may fit")


def _tried(evidence: Evidence, room: Room, changes: Sequence[Change], gives: int) -> Remedy:
    low, high = evidence.needed_without(gives)
    price_us = sum(change.price_us or 0.0 for change in changes)
    return Remedy(
        rules=[change.rule for change in changes],
        titles=[change.title for change in changes],
        gives_bytes=gives,
        needs_low_bytes=low,
        needs_high_bytes=high,
        fits=room.fits(low, high),
        price_us=price_us,
        step_share=room.share(price_us),
        unpriced=[change.rule for change in changes if change.price_us is None],
    )


def _checkpoint(evidence: Evidence) -> Iterator[Change]:
    """Activations saved inside repeated layers that a checkpoint would recompute."""
    stacks = _outermost([fold for fold in evidence.folds if len(fold.layers) > 1])
    blocks = evidence.blocks
    saved = evidence.category("activation") & ~blocks["recompute"].to_numpy()
    held = []
    for fold in stacks:
        repeat = _owners(evidence.layers, fold)
        owner = repeat[blocks["layer"].to_numpy()]
        held.append((evidence.at_peak(saved & (owner >= 0)), fold, repeat, owner))
    for bytes_, fold, repeat, owner in sorted(held, key=lambda row: -row[0])[:_NUM_CHECKPOINTS]:
        text = (
            f"activations saved inside these {len(fold.layers)} layers hold {format_bytes(bytes_)} at the peak; with "
            "torch.utils.checkpoint each layer keeps only its output and recomputes the rest in backward"
        )
        for every, words in {1: "", **_EVERY}.items():
            if every >= len(fold.layers):
                continue
            chosen = (repeat >= 0) & (repeat % every == 0)
            inside = np.flatnonzero(saved & (owner >= 0) & (owner % every == 0))
            if not len(inside):
                continue
            gone, starts, ends = _without_saving(evidence, inside, owner[inside])
            yield Change(
                "checkpoint",
                f"checkpoint {words}{fold.name} ({fold.class_name})",
                text,
                gone,
                starts,
                ends,
                subject=f"checkpoint {fold.name}",
                price_us=evidence.forward_us(chosen),
                is_variant=every > 1,
            )


def _outermost(folds: list[Fold]) -> list[Fold]:
    """Folds that are not inside another fold. Folds come depth first."""
    outermost: list[Fold] = []
    for fold in folds:
        if not any(fold.name.startswith(f"{other.name}.") for other in outermost):
            outermost.append(fold)
    return outermost


def _owners(layers: pd.DataFrame, fold: Fold) -> Array:
    """The repeat of the fold that contains each layer; -1 outside of the fold."""
    owner = np.full(len(layers), -1)
    owner[list(fold.layers)] = np.arange(len(fold.layers))
    for layer, parent in enumerate(layers["parent"].tolist()):
        if owner[layer] < 0 < parent:
            owner[layer] = owner[parent]
    return owner


def _without_saving(evidence: Evidence, inside: Array, owner: Array) -> tuple[Array, Array, Array]:
    """For each block, the bytes that a checkpoint drops and the first and last event of that time.

    Between a repeat's forward (a run of blocks) and backward (its first free), only its last block, the output, stays.
    """
    made, freed = (evidence.blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    gone = np.zeros(len(evidence.blocks))
    starts, ends = made.copy(), freed.copy()
    passes = np.cumsum(np.diff(owner, prepend=-2) != 0) - 1
    last = np.flatnonzero(np.diff(passes, append=-2))
    first_free = np.full(len(last), len(evidence.allocated))
    np.minimum.at(first_free, passes, freed[inside])
    gone[inside] = evidence.blocks["bytes"].to_numpy()[inside]
    gone[inside[last]] = 0
    starts[inside] = made[inside[last]][passes] + 1
    is_run_back = first_free < len(evidence.allocated)  # else the run ended before the backward
    ends[inside] = (first_free - is_run_back)[passes]
    return gone, starts, ends


def _shard_optimizer(evidence: Evidence) -> Iterator[Change]:
    """Optimizer state that every rank of a group duplicates, because the group all-reduces its gradients."""
    state = evidence.category("optimizer_state")
    held = evidence.at_peak(state)
    parameters = evidence.at_peak(evidence.category("parameter"))
    calls = evidence.calls[evidence.calls["operation"].astype(str).str.startswith("all_reduce")]
    phase = calls["phase"].astype(str)
    if not held or held < parameters / 2 or not len(calls):  # less than half: already sharded
        return
    last = calls["step"].max()
    in_backward = calls[(phase == "backward") & (calls["step"] == last)].groupby("group")["bytes_in"].sum()
    for group, bytes_ in in_backward.items():
        # A group that all-reduces in forward too is tensor-parallel.
        if bytes_ < 0.9 * parameters or ((phase == "forward") & (calls["group"] == group)).any():
            continue
        row = evidence.groups.iloc[int(str(group))]
        size, name = int(row["size"]), str(row["description"] or row["name"])
        if size < 2:
            continue
        text = (
            f"all {size:,} ranks of {name} hold the same optimizer state, {format_bytes(held)} at the peak; with "
            f"ZeroRedundancyOptimizer or FSDP2 (fully_shard) each keeps 1/{size:,} of it"
        )
        gone = np.where(state, evidence.blocks["bytes"] * (1 - 1 / size), 0)
        title, line = f"shard the optimizer over {name}", evidence.main_line(state)
        yield Change("shard-optimizer", title, text, gone, line=line)


def _fuse_loss(evidence: Evidence) -> Iterator[Change]:
    """Full logits and their gradient, which an unfused cross entropy holds several times over."""
    is_loss = evidence.operation(_LOSS)
    stack = evidence.blocks["stack"].to_numpy()
    lines = {evidence.lines[number] for number in np.unique(stack[is_loss])} - {""}
    # The cast of the logits is on the same line as the loss.
    on_line = np.array([line in lines for line in evidence.lines])[stack]
    chosen = is_loss | (evidence.operation("_to_copy") & on_line)
    if not chosen.any():
        return
    held = evidence.at_peak(chosen)
    where = f" ({_short(sorted(lines)[0])})" if lines else ""
    text = (
        f"the loss{where} holds {format_bytes(held)} of full logits at the peak; in {_LOSS_PIECES} chunks, with a "
        "fused linear cross entropy, or sharded over the vocabulary (loss parallel) it needs a fraction of that"
    )
    gone = np.where(chosen, evidence.blocks["bytes"] * (1 - 1 / _LOSS_PIECES), 0)
    title, line = f"compute the loss in {_LOSS_PIECES} chunks, or fused", evidence.main_line(chosen)
    yield Change("fuse-loss", title, text, gone, line=line)


def _short(line: str) -> str:
    return line.partition(" (")[0].rpartition("/")[2]


def _fuse_optimizer(evidence: Evidence) -> Iterator[Change]:
    """Temporaries for all parameters at once, which an unfused optimizer allocates."""
    in_optimizer = _is(evidence.blocks["phase"], lambda name: name == "optimizer")
    chosen = evidence.operation("_foreach_") & in_optimizer & evidence.category("temporary")
    if chosen.any():
        held = format_bytes(evidence.at_peak(chosen))
        text = (
            f"the optimizer step holds {held} of temporaries at the peak; fused=True needs none, foreach=False those "
            "of one parameter at a time"
        )
        gone, line = np.where(chosen, evidence.blocks["bytes"], 0), evidence.main_line(chosen)
        yield Change("fuse-optimizer", "use the fused optimizer", text, gone, line=line)


def _drop_gradients(evidence: Evidence) -> Iterator[Change]:
    """Gradients of the previous step that are kept through the forward."""
    gradient = np.flatnonzero(evidence.category("gradient"))
    made, freed = (evidence.blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    bytes_ = evidence.blocks["bytes"].to_numpy()
    gone = np.zeros(len(evidence.blocks))
    starts, ends = made.copy(), freed.copy()
    kept = 0
    phase = evidence.spans["phase"].astype(str)
    for step in sorted(set(evidence.spans["step"]) - {0, 1}):
        of_step = evidence.spans["step"] == step
        forward = evidence.spans.loc[of_step & (phase == "forward"), "first_event"]
        backward = evidence.spans.loc[of_step & (phase == "backward"), "first_event"]
        if not len(forward) or not len(backward):
            continue
        idle = gradient[(made[gradient] < forward.iloc[0]) & (freed[gradient] > backward.iloc[0])]
        gone[idle] = bytes_[idle]
        starts[idle], ends[idle] = forward.iloc[0], backward.iloc[0]
        kept = max(kept, int(gone[idle].sum()))
    if kept:
        text = (
            f"gradients of the previous step, {format_bytes(kept)}, stay allocated during forward; "
            "zero_grad(set_to_none=True) after the optimizer step frees them"
        )
        title = "free the gradients after the step"
        yield Change("drop-gradients", title, text, gone, starts, ends, price_us=0.0)


def _expandable_segments(evidence: Evidence, room: Room) -> Iterator[Advice]:
    """Reserved memory that the allocator cannot use because its free blocks have the wrong sizes."""
    if evidence.grows:
        return
    unused = evidence.reserved_peak - evidence.peak
    text = (
        f"at most {format_bytes(evidence.peak)} was allocated at once, but {format_bytes(evidence.reserved_peak)} was "
        "reserved; PYTORCH_ALLOC_CONF=expandable_segments:True saves up to the difference"
    )
    of = "peak_reserved_bytes"
    if unused >= 0.05 * evidence.reserved_peak:
        low, high = evidence.peak, evidence.reserved_peak
        yield Advice(
            "expandable-segments",
            "use expandable segments",
            text,
            unused,
            of,
            is_upper_bound=True,
            needs_low_bytes=low,
            needs_high_bytes=high,
            fits=room.fits(low, high),
        )


RULES: tuple[Callable[[Evidence], Iterator[Change]], ...] = (
    _checkpoint,
    _shard_optimizer,
    _fuse_loss,
    _fuse_optimizer,
    _drop_gradients,
)
