"""Advice that would lower the peak. Each figure comes from the run's own history without the blocks a change saves.

Every figure is estimated. A rule without a worthwhile saving gives no advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from fakedist.analysis.layer_table import Fold
from fakedist.analysis.recording import Array
from fakedist.rundir.summary import Advice
from fakedist.units import format_bytes

MIN_SHARE = 0.01  # of the peak; a smaller saving is not worth a change
MIN_BYTES = 1 << 20
_LOSS_PIECES = 8
_LOSS = r"log_softmax|nll_loss|cross_entropy"
_NUM_CHECKPOINTS = 2  # at most this many stacks of layers get advice


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
        self.lines = [*map(str, tables["stacks"]["line"]), ""]  # stack -1 (none) indexes the empty line at the end

    def saved(self, bytes_: Array, starts: Array | None = None, ends: Array | None = None) -> int:
        """Bytes by which the peak falls if blocks have fewer between events (default: all of their lifetimes)."""
        num_events = len(self.allocated)
        first = self.blocks["alloc_event"].to_numpy() if starts is None else starts
        end = self.blocks["free_event"].to_numpy() if ends is None else ends
        gone = np.where(first < end, bytes_, 0)
        change = np.bincount(first, gone, num_events + 1) - np.bincount(end, gone, num_events + 1)
        return self.peak - int((self.allocated - np.cumsum(change)[:num_events]).max(initial=0))

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


def find_advice(tables: dict[str, pd.DataFrame], folds: list[Fold]) -> list[Advice]:
    """Advice for a run, largest saving first; those of which only a limit is known come last."""
    if not len(tables["blocks"]):
        return []
    evidence = Evidence(tables, folds)
    advices = [advice for rule in RULES for advice in rule(evidence)]
    worth = max(MIN_BYTES, MIN_SHARE * evidence.peak)
    return sorted(
        (advice for advice in advices if advice.gives_bytes >= worth),
        key=lambda advice: (advice.is_upper_bound, -advice.gives_bytes),
    )


def _checkpoint(evidence: Evidence) -> Iterator[Advice]:
    """Activations saved inside repeated layers that a checkpoint would recompute."""
    stacks = _outermost([fold for fold in evidence.folds if len(fold.layers) > 1])
    blocks = evidence.blocks
    saved = evidence.category("activation") & ~blocks["recompute"].to_numpy()
    advices = []
    for fold in stacks:
        owner = _owners(evidence.layers, fold)[blocks["layer"].to_numpy()]
        inside = np.flatnonzero(saved & (owner >= 0))
        held = evidence.at_peak(saved & (owner >= 0))
        if held < MIN_SHARE * evidence.peak:
            continue
        bytes_, starts, ends = _without_saving(evidence, inside, owner[inside])
        gives = evidence.saved(bytes_, starts, ends)
        text = (
            f"activations saved inside these {len(fold.layers)} layers hold {format_bytes(held)} at the peak; with "
            "torch.utils.checkpoint each layer keeps only its output and recomputes the rest in backward"
        )
        advices.append(Advice("checkpoint", f"checkpoint {fold.name} ({fold.class_name})", text, gives))
    yield from sorted(advices, key=lambda advice: -advice.gives_bytes)[:_NUM_CHECKPOINTS]


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
    ends[inside] = first_free[passes] - 1
    return gone, starts, ends


def _shard_optimizer(evidence: Evidence) -> Iterator[Advice]:
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
        gives = evidence.saved(np.where(state, evidence.blocks["bytes"] * (1 - 1 / size), 0))
        line = evidence.main_line(state)
        yield Advice("shard-optimizer", f"shard the optimizer over {name}", text, gives, line=line)


def _fuse_loss(evidence: Evidence) -> Iterator[Advice]:
    """Full logits and their gradient, which an unfused cross entropy holds several times over."""
    is_loss = evidence.operation(_LOSS)
    stack = evidence.blocks["stack"].to_numpy()
    lines = {evidence.lines[number] for number in np.unique(stack[is_loss])} - {""}
    # The cast of the logits is on the same line as the loss.
    on_line = np.array([line in lines for line in evidence.lines])[stack]
    chosen = is_loss | (evidence.operation("_to_copy") & on_line)
    if not (held := evidence.at_peak(chosen)):
        return
    where = f" ({_short(sorted(lines)[0])})" if lines else ""
    text = (
        f"the loss{where} holds {format_bytes(held)} of full logits at the peak; in {_LOSS_PIECES} chunks, with a "
        "fused linear cross entropy, or sharded over the vocabulary (loss parallel) it needs a fraction of that"
    )
    gives = evidence.saved(np.where(chosen, evidence.blocks["bytes"] * (1 - 1 / _LOSS_PIECES), 0))
    title, line = f"compute the loss in {_LOSS_PIECES} chunks, or fused", evidence.main_line(chosen)
    yield Advice("fuse-loss", title, text, gives, line=line)


def _short(line: str) -> str:
    return line.partition(" (")[0].rpartition("/")[2]


def _fuse_optimizer(evidence: Evidence) -> Iterator[Advice]:
    """Temporaries for all parameters at once, which an unfused optimizer allocates."""
    in_optimizer = _is(evidence.blocks["phase"], lambda name: name == "optimizer")
    chosen = evidence.operation("_foreach_") & in_optimizer & evidence.category("temporary")
    if held := evidence.at_peak(chosen):
        text = (
            f"the optimizer step holds {format_bytes(held)} of temporaries at the peak; fused=True needs none, and "
            "foreach=False those of one parameter at a time"
        )
        gives = evidence.saved(np.where(chosen, evidence.blocks["bytes"], 0))
        line = evidence.main_line(chosen)
        yield Advice("fuse-optimizer", "use the fused optimizer", text, gives, line=line)


def _drop_gradients(evidence: Evidence) -> Iterator[Advice]:
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
        yield Advice("drop-gradients", "free the gradients after the step", text, evidence.saved(gone, starts, ends))


def _expandable_segments(evidence: Evidence) -> Iterator[Advice]:
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
        yield Advice("expandable-segments", "use expandable segments", text, unused, of, is_upper_bound=True)


RULES: tuple[Callable[[Evidence], Iterator[Advice]], ...] = (
    _checkpoint,
    _shard_optimizer,
    _fuse_loss,
    _fuse_optimizer,
    _drop_gradients,
    _expandable_segments,
)
