"""Advice on a pipeline's schedule: how many micro-batches are between forward and backward at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fakedist.analysis.evidence import (
    Change,
    Evidence,
    Passes,
    Price,
    Saving,
    kept_gradients,
    owners,
    passes_of,
    stacks,
)
from fakedist.analysis.recording import Array
from fakedist.analysis.topology import find_pipeline
from fakedist.errors import JobError
from fakedist.rank_list import parse_rank_list

_POINT_TO_POINT = r"send|recv"
_MICRO_BATCH = re.compile(r"--?(?:micro[-_]?batch(?:[-_]?size)?|mbs)")


@dataclass(frozen=True, eq=False)
class Flow:
    """The micro-batches of a rank's last step in a pipeline, each forward through the layers of one stack.

    Attributes:
        number: Micro-batches of a step.
        in_flight: The most that are between forward and backward at once.
        least_in_flight: As many as 1F1B needs on this stage: the stages from it to the last.
        passes: The passes of the stack's layers.
        batch_of_pass: By pass, the number of its micro-batch in its step.
    """

    number: int
    in_flight: int
    least_in_flight: int
    passes: Passes
    batch_of_pass: Array

    @classmethod
    def of(cls, evidence: Evidence) -> Flow | None:
        """None without a pipeline, or if its micro-batches do not go through the layers one after the other."""
        stage = _stages_from_here(evidence) if sends(evidence) else 0
        for fold in stacks(evidence) if stage else ():
            passes = passes_of(evidence, owners(evidence.layers, fold.layers))
            if passes is None:
                continue
            begins = passes.owner == passes.owner.min()
            of_step = passes.step == passes.step.max()
            number = int((begins & of_step).sum())
            order = np.tile(np.unique(passes.owner), number)
            if not np.array_equal(passes.owner[of_step], order):
                return None
            count = np.cumsum(begins) - 1
            first = np.array([count[passes.step == step][0] for step in passes.step])
            back = passes.back_event[begins & of_step]
            in_flight = [
                int((passes.first_event[begins & of_step] <= at).sum() - (back <= at).sum()) for at in back - 1
            ]
            return cls(number, max(in_flight), stage, passes, count - first)
        return None


def sends(evidence: Evidence) -> bool:
    """Whether the last step sends to single ranks, or receives from them."""
    return bool(evidence.last_calls["operation"].str.contains(_POINT_TO_POINT).any())


def is_torch_pipeline(evidence: Evidence) -> bool:
    """Whether torch.distributed.pipelining runs the micro-batches: it splits the first dimension of each input."""
    return bool(evidence.files.astype(str).str.contains("/torch/distributed/pipelining/").any())


def _stages_from_here(evidence: Evidence) -> int:
    """The number of pipeline stages from this rank's to the last; 0 if it is not known."""
    calls = evidence.last_calls
    used = calls.loc[calls["operation"].str.contains(_POINT_TO_POINT), "group"].unique()
    own = evidence.groups.iloc[int(used[0])]
    if is_torch_pipeline(evidence):  # it needs a group whose ranks are the stages
        return int(own["size"]) - int(own["group_rank"]) if len(used) == 1 else 0
    rank = parse_rank_list(str(own["ranks"]))[int(own["group_rank"])]
    try:
        pipeline = find_pipeline(evidence.groups, evidence.calls, rank)
    except JobError:
        return 0
    return len(pipeline.ranks) - pipeline.ranks.index(rank) if pipeline and rank in pipeline.ranks else 0


def micro_batch(evidence: Evidence, flow: Flow) -> tuple[int, str]:
    """Samples of a micro-batch, and the flag of the command line that has them. 0 if they are not known for certain.

    The first dimension of a stage's input counts samples if the only other is the sequence's, or if torch splits it.
    """
    last = evidence.steps.iloc[-1]
    samples = int(last["samples"])
    if not samples or samples % flow.number:
        return 0, ""
    size = samples // flow.number
    words = [word for argument in evidence.setup.arguments for word in argument.split("=", 1)]
    named = (flag for flag, value in pairwise(words) if _MICRO_BATCH.fullmatch(flag) and value == str(size))
    flag = next(named, "")
    is_known = flag or is_torch_pipeline(evidence) or "x" not in str(last["sample_shape"])
    return (size, flag) if is_known else (0, "")


def alternate(evidence: Evidence) -> Iterator[Change]:
    """A pipeline that runs all forwards before the first backward: with 1F1B, fewer micro-batches are in flight.

    Forwards of the run at which the next micro-batches would not have begun yet, or their backwards would have ended,
    lack what those saved. At least, the gradients of the first backwards are there during the later forwards. At most,
    a script that held micro-batches beyond their backwards, with what it received and sent for them, no longer does.
    """
    flow = Flow.of(evidence)
    if flow is None or flow.number <= flow.least_in_flight:
        return
    width, blocks = flow.least_in_flight, evidence.blocks
    made, freed, bytes_ = (blocks[name].to_numpy() for name in ("alloc_event", "free_event", "bytes"))
    gone, held, more = (np.zeros(len(blocks)) for _ in range(3))
    late = np.zeros(len(blocks), bool)
    passed_on = evidence.category("communication")
    starts, ends = made.copy(), made.copy()
    kept, _ = kept_gradients(evidence)
    for step in np.unique(flow.passes.step).tolist():
        saved = _saved(evidence, flow, step)
        if saved is None:
            return
        own, batch, next_back = saved
        number = int(batch.max()) + 1
        if number <= width:  # of a step with fewer micro-batches
            return
        begin, over = (np.full(number, sign * np.iinfo("i8").max) for sign in (1, -1))
        np.minimum.at(begin, batch, made[own])
        in_time = freed[own] < next_back[batch]  # a script that holds outputs for longer may do so or not
        np.maximum.at(over, batch[in_time], freed[own][in_time])
        all_forward, over = int(made[own].max()) + 1, _ends_of_spans(evidence, over, next_back)
        leaves = np.append(begin, np.full(width, all_forward))[np.arange(number) + width]
        returns = np.append(np.full(width, all_forward), over)[:number]
        gone[own], starts[own], ends[own] = bytes_[own], leaves[batch], returns[batch]
        late[own] = ~in_time & (batch + width < number)
        of_block = np.searchsorted(next_back[:-1], made, "right")  # the backward during or before which it is made
        is_own = (made < begin[0]) | (evidence.phase("backward") & (made < freed[own].max()))
        other = np.flatnonzero(passed_on & is_own & (freed > next_back[of_block]) & (freed < freed[own].max()))
        more[other], starts[other], late[other] = bytes_[other], np.maximum(made, over[of_block])[other], True
        of_step = kept[blocks["step"].to_numpy()[kept] == step]
        held[of_step], starts[of_step], ends[of_step] = bytes_[of_step], begin[width], all_forward
    calls = evidence.last_calls
    sent = calls.loc[calls["operation"].str.contains(_POINT_TO_POINT), "sequence"]
    yield Change(
        "one-forward-one-backward",
        "begin each backward as soon as it can, not after all forwards"
        + (": Schedule1F1B instead of ScheduleGPipe" if is_torch_pipeline(evidence) else " (1F1B)"),
        f"all {flow.number} micro-batches of a step are between forward and backward at once; with 1F1B, {width} are, "
        "one for each stage from this one to the last. Smaller micro-batches alone save little here, as all of them "
        "stay. The bubble is as long, but each micro-batch waits for its sends and receives",
        Saving(gone + more, starts, np.where(late, freed, ends)),
        Saving(gone - held, starts, ends),
        line=evidence.main_line(gone > 0),
        subjects=frozenset({"schedule"}),
        price=None if evidence.kernels is None else Price(0.0, evidence.calls_us(sent), "sends and receives"),
        has_other_blocks=True,
    )


def _saved(evidence: Evidence, flow: Flow, step: int) -> tuple[Array, Array, Array] | None:
    """Blocks that a step's forwards saved, the micro-batch of each, and by micro-batch the next one's first free.

    None if the backwards of the micro-batches are in another order than their forwards.
    """
    passes, blocks = flow.passes, evidence.blocks
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    of_step = passes.step == step
    number = int(flow.batch_of_pass[of_step].max()) + 1
    begin, back = (np.full(number, np.iinfo("i8").max) for _ in range(2))
    end = np.zeros(number, "i8")
    batch = flow.batch_of_pass[of_step]
    np.minimum.at(begin, batch, passes.first_event[of_step])
    np.minimum.at(back, batch, passes.back_event[of_step])
    np.maximum.at(end, batch, passes.end_event[of_step])
    if (np.diff(back) <= 0).any() or back[0] <= end[-1]:
        return None
    saved = evidence.category("activation") & evidence.phase("forward") & ~blocks["recompute"].to_numpy()
    own = np.flatnonzero(saved & (blocks["step"].to_numpy() == step) & (freed > end[-1]))
    of_block = np.maximum(np.searchsorted(begin, made[own], "right") - 1, 0)
    # After the last layer follow the loss, and the next micro-batch's embedding, which outlives this backward.
    is_next = (made[own] > end[of_block]) & (freed[own] > back[of_block]) & (of_block < number - 1)
    return own, of_block + is_next, np.append(back[1:], np.iinfo("i8").max)


def _ends_of_spans(evidence: Evidence, events: Array, limits: Array) -> Array:
    """The first events of the spans after some events, if they begin before the limits; else the next events."""
    begins = np.append(evidence.spans["first_event"].to_numpy(), np.iinfo("i8").max)
    following = begins[np.searchsorted(begins, events, "right")]
    return np.where(following < limits, following, events + 1)
