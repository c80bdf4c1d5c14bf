"""The tables of a run as advice reads them, and changes to it, whose outcome is its own history played again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd

from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.recording import Array

BLOCK_BYTES = 512  # kMinBlockSize of the caching allocator: sizes are multiples of it
_NUM_SAMPLES = 256
#: What ``torch.utils.checkpoint`` without reentrance costs the host at most, measured with torch 2.15 on chains of 1 to
#: 16 layers: a call as much as this many launches, its hooks this much of the forward that runs again.
_CHECKPOINT, _HOOKS = 12, 2.0
Fits = Literal["fits", "may fit", "does not fit", ""]


@dataclass(frozen=True, eq=False)
class Saving:
    """For each block of a run, the bytes that are gone from event ``starts`` until event ``ends``.

    The two default to the block's whole lifetime. Bytes below zero are held in addition, at any time.
    """

    bytes_: Array
    starts: Array | None = None
    ends: Array | None = None


@dataclass(frozen=True)
class Price:
    """The least and most that a change makes the step longer, in microseconds, and what that time is spent on."""

    low_us: float
    high_us: float
    spent_on: str


@dataclass(frozen=True, eq=False)
class Change:
    """A change to the job and what it saves.

    ``least`` is the saving that is certain, where ``most`` is only the most that it can be; None if both are one. Of
    changes that share one of their ``subjects`` only one can be made. ``price`` is None if it is not known. With
    ``has_other_blocks``, a step has others than now, and as many bytes more may be allocated that nothing asked for.
    """

    rule: str
    title: str
    text: str
    most: Saving
    least: Saving | None = None
    line: str = ""
    subjects: frozenset[str] = frozenset()
    price: Price | None = None
    is_variant: bool = False
    has_other_blocks: bool = False


@dataclass(frozen=True)
class Room:
    """The memory that the rank may reserve, and how long its step is.

    ``low_bytes`` is left if NCCL and the CUDA context take the most that they may, ``high_bytes`` if the least; None if
    the GPU's memory is not known, or the run ended before its peak. ``step_us`` is None if no step was timed.
    ``capacity_bytes`` is the GPU's memory, 0 if it is not known.
    """

    low_bytes: int | None = None
    high_bytes: int | None = None
    step_us: float | None = None
    capacity_bytes: int = 0

    def fits(self, low_bytes: int, high_bytes: int) -> Fits:
        """Whether something between these would fit."""
        if self.low_bytes is None or self.high_bytes is None:
            return ""
        return "fits" if high_bytes <= self.low_bytes else "may fit" if low_bytes <= self.high_bytes else "does not fit"

    def share(self, price_us: float | None) -> float | None:
        """A price as a share of the step."""
        return price_us / self.step_us if price_us is not None and self.step_us else None


@dataclass(frozen=True)
class Setup:
    """Facts about the job that no table has.

    Attributes:
        arguments: The script's command line.
        host_bandwidth: Bytes per second from the GPU to its host, and back; 0 if not known.
        gpus_per_node: GPUs that share a host.
    """

    arguments: tuple[str, ...] = ()
    host_bandwidth: float = 0.0
    gpus_per_node: int = 1


#: Room and setup of a run of which neither is known.
ANYWHERE, UNKNOWN = Room(), Setup()


def curve(first: Array, end: Array, bytes_: Array, num_events: int) -> Array:
    """The sum at each event of bytes that are there from a first event until an end."""
    change = np.bincount(first, bytes_, num_events + 1) - np.bincount(end, bytes_, num_events + 1)
    return np.asarray(np.cumsum(change)[:num_events])


class Evidence:
    """The tables of a run, in the form that the rules of advice use."""

    def __init__(self, tables: dict[str, pd.DataFrame], folds: list[Fold], setup: Setup = UNKNOWN) -> None:
        self.folds, self.setup = folds, setup
        self.blocks, self.layers = tables["blocks"], tables["layers"]
        self.spans, self.calls, self.groups = tables["spans"], tables["calls"], tables["groups"]
        self.steps, self.shares = tables["steps"], tables["shares"]
        self.files = tables["frames"]["filename"]
        self.grows = matches(tables["events"]["action"], lambda name: name == "segment_map").any()
        asleep = tables["asleep"]
        num_events = len(tables["events"])
        first, end, sleeps = (asleep[name].to_numpy() for name in ("first_event", "end_event", "block"))
        asleep_bytes = curve(first, end, self.blocks["bytes"].to_numpy()[sleeps], num_events)
        self.allocated = tables["events"]["allocated_bytes"].to_numpy() - asleep_bytes
        self.reserved_peak = int((tables["events"]["reserved_bytes"] - asleep_bytes).max()) if num_events else 0
        self.peak = int(self.allocated.max(initial=0))
        #: Blocks that a change may move. Those of an engine that sleeps are its settings'.
        self._is_moved = ~np.isin(np.arange(len(self.blocks)), sleeps)
        if len(asleep):
            peak = int(self.allocated.argmax())
            alive = (self.blocks["alloc_event"] <= peak) & (self.blocks["free_event"] > peak)
            sleep_then = np.isin(np.arange(len(alive)), sleeps[(first <= peak) & (end > peak)])
            self.blocks = self.blocks.assign(at_peak=alive & ~sleep_then)
        self.lines = [*map(str, tables["stacks"]["line"]), ""]  # stack -1 (none) indexes the empty line at the end
        self._tables = tables

    def saved(self, changes: Sequence[Change]) -> tuple[int, int]:
        """The least and most bytes by which the peak falls with these changes."""
        most = self._saved([change.most for change in changes])
        if all(change.least is None for change in changes):
            return most, most
        least = self._saved([change.least or change.most for change in changes])
        cut_otherwise = self.rounding * any(change.has_other_blocks for change in changes)
        return min(least, most) - cut_otherwise, max(least, most) + self.rounding

    @cached_property
    def kept_peak(self) -> int:
        """The most bytes in blocks at one time, with those that are freed and still in use on a stream."""
        return self.kept_without(np.zeros(len(self.blocks), bool))

    def kept_without(self, gone: Array) -> int:
        """The same without some blocks."""
        made, freed, reused = (self.blocks[name].to_numpy() for name in ("alloc_event", "free_event", "reuse_event"))
        size = self.blocks["bytes"].to_numpy()
        waiting = curve(freed, reused, np.where(gone, 0, size), len(self.allocated))
        held = self.allocated - curve(made, freed, np.where(gone, size, 0), len(self.allocated))
        return int((held + waiting).max(initial=0))

    @cached_property
    def rounding(self) -> int:
        """Bytes at the peak that nothing asked for: with other blocks before them, blocks may be cut from others."""
        alive = self.blocks[self.blocks["at_peak"]]
        asked = -(-alive["requested_bytes"] // BLOCK_BYTES) * BLOCK_BYTES
        return int((alive["bytes"] - asked).clip(lower=0).sum())

    def _saved(self, savings: Sequence[Saving]) -> int:
        """Bytes by which the peak falls: shares of whole lifetimes multiply, then the first drop counts."""
        num_events = len(self.allocated)
        size = self.blocks["bytes"].to_numpy()
        made, freed = (self.blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
        left = np.ones(len(size))
        later = []
        for saving in savings:
            first = made if saving.starts is None else saving.starts
            end = freed if saving.ends is None else saving.ends
            bytes_ = np.where(self._is_moved, saving.bytes_, 0)
            is_whole = (bytes_ > 0) & (first <= made) & (end >= freed)
            left[is_whole] *= 1 - bytes_[is_whole] / np.maximum(size[is_whole], 1)
            later.append((first, end, np.where(is_whole | (first >= end), 0, bytes_)))
        change = np.zeros(num_events)
        is_gone = np.zeros(len(size), bool)
        rows = [(made, freed, size * (1 - left))]
        for first, end, bytes_ in later:
            rows.append((first, end, np.where(is_gone, 0, bytes_ * left)))
            is_gone |= bytes_ > 0
        for first, end, gone in rows:
            change += curve(first, end, gone, num_events)
        return self.peak - int(np.ceil((self.allocated - change).max(initial=0) - 1e-3))

    @cached_property
    def _samples(self) -> Array:
        """The event with the most allocated of each of up to ``_NUM_SAMPLES`` parts of the run."""
        parts = np.array_split(np.arange(len(self.allocated)), min(_NUM_SAMPLES, max(len(self.allocated), 1)))
        return np.array([part[self.allocated[part].argmax()] for part in parts if len(part)], "i8")

    def gone_at_samples(self, saving: Saving) -> Array:
        """The most bytes that are gone at each sampled event, whatever else changes."""
        made, freed = (self.blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
        first = made if saving.starts is None else saving.starts
        end = freed if saving.ends is None else saving.ends
        bytes_ = np.where(self._is_moved & (first < end), np.maximum(saving.bytes_, 0), 0)
        return curve(first, end, bytes_, len(self.allocated))[self._samples]

    def least_needed(self, gone: Sequence[Array]) -> int:
        """A limit from below of what changes leave, from what each drops at the samples (:meth:`gone_at_samples`)."""
        return int((self.allocated[self._samples] - np.sum(gone, axis=0)).max(initial=0))

    def needed_without(self, least: int, most: int) -> tuple[int, int]:
        """The least and most that the rank would need reserved if the allocated peak fell by so many bytes."""
        return self.peak - most, self.peak - least + max(self.reserved_peak - self.peak, 0)

    # ---- masks of blocks

    def category(self, wanted: str) -> Array:
        """Mask of the blocks of a category."""
        return matches(self.blocks["category"], lambda name: name == wanted)

    def phase(self, *wanted: str) -> Array:
        """Mask of the blocks allocated in one of the phases."""
        return matches(self.blocks["phase"], lambda name: name in wanted)

    def operation(self, pattern: str) -> Array:
        """Mask of the blocks allocated by an operation whose name matches the pattern."""
        matcher = re.compile(pattern)
        return matches(self.blocks["operation"], lambda name: matcher.search(name) is not None)

    def at_peak(self, chosen: Array) -> int:
        """Bytes of the chosen blocks that are alive at the peak."""
        return int(self.blocks.loc[chosen & self.blocks["at_peak"].to_numpy(), "bytes"].sum())

    def main_line(self, chosen: Array) -> str:
        """The line that allocated most of the chosen blocks alive at the peak; empty if none of them has a line."""
        alive = self.blocks[chosen & self.blocks["at_peak"].to_numpy()]
        lines = pd.Series(self.lines).iloc[alive["stack"].to_numpy()]
        held = alive["bytes"].groupby(lines.to_numpy()).sum().drop("", errors="ignore")
        return str(held.idxmax()) if len(held) else ""

    # ---- times

    @cached_property
    def kernels(self) -> pd.DataFrame | None:
        """The timed step's kernels, collectives among them; None without one whose durations are known."""
        kernels = self._tables.get("kernels")
        if kernels is None or not (kernels["duration_us"] > 0).any():
            return None
        return kernels.assign(is_call=(kernels["call"] >= 0) | (kernels["family"].astype(str) == "communication"))

    def kernels_us(
        self,
        phases: Sequence[str],
        layers: Array | None = None,
        without: str = "",
        *,
        until: tuple[Array, Array] | None = None,
    ) -> float | None:
        """How long kernels of phases take, collectives and recomputation left out; None without a timed step.

        Args:
            layers: A mask of the layers that ran them; None for any.
            without: A pattern of operations whose kernels are left out.
            until: The first operations of passes, sorted, and of each the last whose kernels count. It has no effect
                where another step than these was timed.
        """
        kernels = self.kernels
        if kernels is None:
            return None
        chosen = kernels["phase"].isin(phases).to_numpy() & ~kernels["is_call"].to_numpy()
        chosen &= ~kernels["recompute"].to_numpy(bool)
        if layers is not None:
            chosen &= layers[kernels["layer"].to_numpy()]
        if without:
            matcher = re.compile(without)
            chosen &= ~matches(kernels["operation"], lambda name: matcher.search(name) is not None)
        if until is not None:
            of_pass = np.searchsorted(until[0], kernels["op"].to_numpy(), "right") - 1
            is_recorded = kernels["step"].to_numpy() <= self.blocks["step"].max()
            chosen &= (of_pass < 0) | ~is_recorded | (kernels["op"].to_numpy() <= until[1][of_pass])
        return float(np.nansum(kernels["duration_us"].to_numpy()[chosen]))

    def host_us(self, phase: str, layers: Array) -> float:
        """How long the host takes to launch the kernels of layers, from each to the next."""
        gaps, is_own, is_inside = self._launch_gaps(phase, layers)
        return float(np.nansum(gaps[is_own & is_inside]))

    def checkpoint_us(self, layers: Array, number: int) -> float:
        """The most that the host takes for the forward of layers again, in so many calls of ``checkpoint``."""
        gaps, is_own, is_inside = self._launch_gaps("forward", layers)
        known = gaps[is_inside & np.isfinite(gaps)]
        usual_us = float(np.median(known)) if len(known) else 0.0
        again_us = float(np.nansum(np.where(is_inside, gaps, usual_us)[is_own]))
        return (1 + _HOOKS) * again_us + _CHECKPOINT * number * usual_us

    def _launch_gaps(self, phase: str, layers: Array) -> tuple[Array, Array, Array]:
        """By launch: the time to the next, whether it is of these layers, and whether both are alike in that."""
        if self.kernels is None:
            return np.zeros(0), np.zeros(0, bool), np.zeros(0, bool)
        kernels = self.kernels[~self.kernels["is_call"]].sort_values("launch_us", kind="stable")
        is_phase = (kernels["phase"] == phase).to_numpy()
        is_own = is_phase & layers[kernels["layer"].to_numpy()]
        after = np.append(is_own[1:], False)
        gaps = np.diff(kernels["launch_us"].to_numpy(), append=np.nan)
        return gaps, is_own, is_phase & (after == is_own) & np.append(is_phase[1:], False)

    def calls_us(self, sequence: pd.Series) -> float:
        """How long the timed step's collectives of these sequence numbers take."""
        if self.kernels is None:
            return 0.0
        return float(self.kernels.loc[self.kernels["call"].isin(sequence), "duration_us"].sum())

    # ---- groups

    @cached_property
    def last_calls(self) -> pd.DataFrame:
        """The calls of the timed step, else of the last one, operations and phases as text."""
        timed = (
            () if self.kernels is None else self.calls.loc[self.calls["sequence"].isin(self.kernels["call"]), "step"]
        )
        last = self.calls[self.calls["step"] == (max(timed) if len(timed) else self.calls["step"].max())]
        return pd.DataFrame(last).astype({"operation": str, "phase": str})

    @cached_property
    def replicas(self) -> ReplicaGroup | None:
        """The group whose ranks hold the same model: it all-reduces all gradients; None without one."""
        gathered = self.phase("forward", "backward")  # by FSDP
        parameters = self.at_peak(self.category("parameter") & ~gathered)
        calls = self.last_calls[self.last_calls["operation"].str.startswith("all_reduce")]
        reduced = calls[calls["phase"] != "forward"].groupby("group")["bytes_in"].sum()
        for group, bytes_ in reduced.items():
            # A group that all-reduces in forward too is tensor-parallel.
            if bytes_ < 0.9 * parameters or ((calls["phase"] == "forward") & (calls["group"] == group)).any():
                continue
            number = int(str(group))
            if self.group_size(number) > 1:
                return ReplicaGroup(number, self.group_label(number), self.group_size(number))
        return None

    @cached_property
    def splits_tensors(self) -> set[int]:
        """Groups that call in forward for activations: tensor, sequence, context and expert parallel ones.

        FSDP's groups gather parameters in forward, and reduce-scatter gradients in backward alone.
        """
        calls = self.last_calls
        groups = set()
        for group, own in calls.groupby("group"):
            number = int(str(group))
            names = own["operation"]
            is_forward = own["phase"] == "forward"
            computes = names.str.startswith(("all_reduce", "reduce_scatter", "all_to_all"))
            if self.group_size(number) > 1 and (is_forward & computes).any():
                groups.add(number)
        return groups

    def group_size(self, group: int) -> int:
        """Ranks in a group."""
        return int(self.groups["size"].iloc[group]) if 0 <= group < len(self.groups) else 0

    def group_label(self, group: int) -> str:
        """A group's description, or its name."""
        row = self.groups.iloc[group]
        return str(row["description"] or row["name"])


@dataclass(frozen=True)
class ReplicaGroup:
    """Ranks that hold the same parameters."""

    number: int
    label: str
    size: int


def matches(values: pd.Series, test: Callable[[str], bool]) -> Array:
    """Values that pass the test, which runs once per distinct value, since there are millions of blocks."""
    categories = values.astype("category").cat
    return np.array([*map(test, categories.categories.astype(str)), False], bool)[categories.codes.to_numpy()]


# ---- repeated layers


@dataclass(frozen=True, eq=False)
class Passes:
    """The forwards of a stack's layers, in order, and the blocks that each saved for backward.

    Attributes:
        blocks: The saved blocks, in order of allocation.
        pass_of: The pass of each block.
        owner: By pass, the layer's number in the stack.
        last: By pass, its last saved block: the layer's output.
        first_event: By pass, the event that made its first block.
        end_event: By pass, the event that made its last block.
        back_event: By pass, the first event at which backward frees one of its blocks; the number of events if none.
        step: By pass, its step.
    """

    blocks: Array
    pass_of: Array
    owner: Array
    last: Array
    first_event: Array
    end_event: Array
    back_event: Array
    step: Array

    def keeps_output(self, bytes_: Array) -> Array:
        """By pass, whether its last saved block is its output: that of a pipeline's stage is sent, and not saved.

        It is not certain of the last pass of each step and micro-batch: there, what is as large as the outputs of other
        passes is one.

        Args:
            bytes_: Of each block.
        """
        sizes = bytes_[self.last]
        is_last = self.next == np.arange(len(self.owner))
        return np.asarray(~is_last | np.isin(sizes, sizes[~is_last]) | is_last.all())

    @property
    def next(self) -> Array:
        """By pass, the next one of its step and micro-batch; itself if it is the last."""
        number = np.arange(len(self.owner))
        after = np.minimum(number + 1, len(number) - 1)
        is_next = (self.owner[after] > self.owner) & (self.step[after] == self.step)
        return np.where(is_next, after, number)


def passes_of(evidence: Evidence, owner: Array) -> Passes | None:
    """The passes of layers that own blocks (``owner`` is a layer's number by row of ``layers``, -1 for others)."""
    blocks = evidence.blocks
    of_block = owner[blocks["layer"].to_numpy()]
    saved = evidence.category("activation") & ~blocks["recompute"].to_numpy()
    inside = np.flatnonzero(saved & (of_block >= 0))
    if not len(inside):
        return None
    made, freed = (blocks[name].to_numpy()[inside] for name in ("alloc_event", "free_event"))
    step = blocks["step"].to_numpy()[inside]
    begins = (np.diff(of_block[inside], prepend=-2) != 0) | (np.diff(step, prepend=-2) != 0)
    pass_of = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(inside)) - 1
    back = np.full(len(first), len(evidence.allocated))
    np.minimum.at(back, pass_of, freed)
    return Passes(
        inside, pass_of, of_block[inside][first], inside[last], made[first], made[last], back, step=step[first]
    )


def owners(layers: pd.DataFrame, of: Sequence[int]) -> Array:
    """For each layer, which of some layers contains it; -1 if none does."""
    owner = np.full(len(layers), -1)
    owner[list(of)] = np.arange(len(of))
    for layer, parent in enumerate(layers["parent"].tolist()):
        if owner[layer] < 0 < parent:
            owner[layer] = owner[parent]
    return owner


def stacks(evidence: Evidence) -> list[Fold]:
    """Repeated layers that are not inside others. Folds come depth first."""
    outermost: list[Fold] = []
    for fold in evidence.folds:
        if len(fold.layers) > 1 and not any(fold.name.startswith(f"{other.name}.") for other in outermost):
            outermost.append(fold)
    return outermost


def recomputed(evidence: Evidence, passes: Passes, chosen: Array, *, keeps_output: bool = True) -> Saving:
    """The saving of recomputing what some passes saved.

    Between a layer's forward and backward (its first free), only its last block, the output, stays.
    """
    blocks = evidence.blocks
    num_events = len(evidence.allocated)
    gone = np.zeros(len(blocks))
    starts, ends = (blocks[name].to_numpy().copy() for name in ("alloc_event", "free_event"))
    is_chosen = chosen[passes.pass_of]
    inside, of = passes.blocks[is_chosen], passes.pass_of[is_chosen]
    gone[inside] = blocks["bytes"].to_numpy()[inside]
    if keeps_output:
        gone[passes.last[passes.keeps_output(blocks["bytes"].to_numpy())]] = 0
    starts[inside] = passes.end_event[of] + 1
    is_run_back = passes.back_event < num_events  # else the run ended before the backward
    ends[inside] = (passes.back_event - is_run_back)[of]
    return Saving(gone, starts, ends)


def freed_early(evidence: Evidence, passes: Passes, recomputed: Saving) -> Saving | None:
    """The most that recomputing saves, if that is more: without reentrance, what a node reads is freed earlier.

    Autograd's engine sums the gradient of a broadcast input, such as a bias, once the node is done, and only then
    releases what the node saved. Inputs that a checkpoint's hooks hand to the node are the node's alone. What the sums
    work in takes their place then.
    """
    blocks = evidence.blocks
    size, op = (blocks[name].to_numpy() for name in ("bytes", "op"))
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    sums = np.flatnonzero(evidence.operation(_SUM) & evidence.phase("backward") & evidence.category("temporary"))
    read = passes.blocks[recomputed.bytes_[passes.blocks] > 0]
    read = read[np.argsort(freed[read], kind="stable")]
    read_until, held = freed[read], np.concatenate([[0], np.cumsum(size[read])])
    gone = recomputed.bytes_.copy()
    made_next = np.append(made[1:], len(evidence.allocated))
    for of_sum in np.split(sums, np.flatnonzero(np.diff(op[sums])) + 1) if len(sums) else ():
        first, last = np.searchsorted(read_until, [made[of_sum[0]], made_next[of_sum[-1]]])
        left = held[last] - held[first]
        for block in of_sum:
            gone[block] = min(size[block], left)
            left -= gone[block]
    if (gone == recomputed.bytes_).all():
        return None
    return Saving(gone, recomputed.starts, recomputed.ends)


_SUM = r"aten\.sum\.dim_IntList"


def recompute_price(evidence: Evidence, passes: Passes, layers: Array, without: str = "") -> Price | None:
    """The time of the kernels that layers run again.

    At most, their collectives for activations are added, or the host takes longer to launch them. At least, without
    reentrance, a recomputation stops once it has made the last block that backward needs. The output of a layer, its
    last block, is the next layer's.
    """
    most = evidence.kernels_us(("forward",), layers, without)
    if most is None:
        return None
    op = evidence.blocks["op"].to_numpy()
    is_needed = ~np.isin(passes.blocks, passes.last)
    first, until = (np.full(len(passes.owner), sign * np.iinfo("i8").max) for sign in (1, -1))
    np.minimum.at(first, passes.pass_of, op[passes.blocks])
    np.maximum.at(until, passes.pass_of[is_needed], op[passes.blocks[is_needed]])
    least = evidence.kernels_us(("forward",), layers, without, until=(first, until))
    calls = evidence.last_calls
    is_ours = (calls["phase"] == "forward") & calls["group"].isin(evidence.splits_tensors) & layers[calls["layer"]]
    on_gpu = most + evidence.calls_us(calls.loc[is_ours, "sequence"])
    is_run_again = layers[evidence.blocks["layer"].to_numpy()[passes.blocks]]
    runs = np.bincount(passes.step[np.unique(passes.pass_of[is_run_again])], minlength=1).max()
    return Price(least or 0.0, max(on_gpu, evidence.checkpoint_us(layers, int(runs))), "recomputation")


def kept_gradients(evidence: Evidence) -> tuple[Array, Array]:
    """Gradients that outlive their step's backward, and the first event of that step's forward."""
    blocks = evidence.blocks
    spans = evidence.spans.astype({"phase": str})
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    gradients = np.flatnonzero(evidence.category("gradient") & evidence.phase("backward"))
    begins = spans[spans["phase"] == "forward"].groupby("step")["first_event"].min()
    last = spans["first_event"].shift(-1, fill_value=len(evidence.allocated))[spans["phase"] == "backward"]
    ended = last.groupby(spans["step"]).max()
    step = blocks["step"].to_numpy()[gradients]
    forward = begins.reindex(step).to_numpy("f8", na_value=np.inf)
    outlives = freed[gradients] >= ended.reindex(step).to_numpy("f8", na_value=np.inf)
    chosen = outlives & (forward < made[gradients])
    return gradients[chosen], forward[chosen].astype("i8")
