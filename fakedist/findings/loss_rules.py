"""Rules of the loss and its logits: what the largest tensors of a job hold at its peak without need."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.findings.case import Case, base_name
from fakedist.findings.registry import Fault, rule
from fakedist.units import format_bytes

_LOSS = r"log_softmax|logsumexp|nll_loss|cross_entropy|log_sigmoid"
#: Also by the names that snapshots have: aten::linear.
_PRODUCT = r"(?:\.|::)(?:mm|addmm|bmm|_scaled_mm|linear|matmul|einsum)(?:\.|$)"
_COPIES = {"half": 0.5, "same": 1.0, "double": 2.0}
_NEAR = 0.02  # shifted by a token, or rounded up
_FEWEST_COPIES = 3
_MOST_OF_A_CHUNK = 1.02
#: Makes dense tensors of packed ones, or of those of other ranks.
_DENSE = r"zeros|full|index_put|constant_pad_nd|scatter|all_gather|allgather"
_HALF_A_LOSS = 0.49
_MOST_COMPUTED = 0.9


@rule("FD101", "chunks of a loss kept until backward", "blocks", "layers", "stacks")
def loss_chunks(case: Case) -> Iterator[Fault]:
    """A loss that is computed in chunks, to save memory, keeps what every chunk saves for backward.

    Autograd holds the saved tensors of each chunk, usually its log-probabilities, until backward reaches it. All chunks
    together then take as much as the loss in one piece.

    The rule sees blocks of equal size that one line of the script saved for backward with a loss's operation, one after
    the other in a step, with no repeated layer between them, alive together.

    **Mend**: wrap the chunk's function in `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, or compute the
    gradient within the chunk, as fused linear cross-entropy kernels do.

    Reported in labs-molt#121, NeMo-RL#2882, prime-rl#1496 and trl#5853.
    """
    evidence = case.evidence
    blocks = evidence.blocks
    is_loss = evidence.operation(_LOSS) & evidence.phase("forward") & case.is_outside
    saved = np.flatnonzero(case.is_saved & case.is_outside)
    sizes, stack = blocks["bytes"].to_numpy(), blocks["stack"].to_numpy()
    made, freed = blocks["alloc_event"].to_numpy(), blocks["free_event"].to_numpy()
    step = blocks["step"].to_numpy()[saved]
    inner = np.sort(made[case.is_saved & ~case.is_outside])
    losses = np.sort(made[is_loss])
    if not len(losses):
        return
    runs = [
        chunks
        for _, rows in pd.Series(saved).groupby([stack[saved], blocks["operation"].astype(str).to_numpy()[saved], step])
        for chunks in _runs(rows.to_numpy(), sizes, made, freed, inner)
        if len(chunks) > 1 and np.diff(np.searchsorted(losses, made[chunks])).all()  # a loss between them
    ]
    if not runs:
        return
    chunks = max(runs, key=lambda run: int(sizes[run].sum()))
    gives = case.saved(*_but_one_chunk(case, [run for run in runs if stack[run[0]] == stack[chunks[0]]], inner))
    held, one = int(sizes[chunks].sum()), int(sizes[chunks].max())
    if case.is_worth(min(gives, held - one)):
        yield Fault(
            f"{len(chunks)} chunks of the loss keep {format_bytes(held)} ({held:,} bytes) until backward; one takes "
            f"{format_bytes(one)} ({one:,} bytes)",
            "checkpoint the function of a chunk, or use a fused linear cross-entropy",
            case.line(stack[chunks[0]]),
            gives_bytes=(gives, gives),
            advice="chunk-loss",
        )


def _runs(rows: Array, sizes: Array, made: Array, freed: Array, inner: Array) -> Iterator[Array]:
    """Blocks of a line, in runs of equal size but for a smaller last one, alive together, no layer between them."""
    passed = np.searchsorted(inner, made[rows])
    start, first_freed = 0, freed[rows[0]]
    for end in range(1, len(rows) + 1):
        goes_on = end < len(rows) and (
            passed[end] == passed[start]
            and sizes[rows[end]] <= _MOST_OF_A_CHUNK * sizes[rows[start]]
            and first_freed > made[rows[end]]
        )
        if goes_on:
            first_freed = min(first_freed, freed[rows[end]])
        else:
            yield rows[start:end]
            start, first_freed = end, freed[rows[end : end + 1]].max(initial=0)


def _but_one_chunk(case: Case, runs: list[Array], inner: Array) -> tuple[Array, Array, Array]:
    """For each block, what goes if a chunk's saved tensors are recomputed in backward, and from when until when.

    Args:
        case: The run.
        runs: The chunks of each time that the loss is computed.
        inner: When repeated layers make what they save.
    """
    blocks = case.evidence.blocks
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    gone = np.zeros(len(blocks))
    starts = made.copy()
    ends = freed.copy()
    for chunks in runs:
        period = made[chunks[1]] - made[chunks[0]]
        before = inner[inner < made[chunks[0]]]
        first = max(made[chunks[0]] - period + 1, before[-1] + 1 if len(before) else 0)
        ours = np.flatnonzero(case.is_saved & case.is_outside & (made >= first) & (made <= made[chunks[-1]]))
        chunk = np.searchsorted(made[chunks], made[ours])
        # Backward makes a chunk's tensors again once it has freed those of the chunk before.
        first_made = made[chunks] + 1
        back = np.full(len(chunks), first_made.max())
        in_backward = np.argsort(freed[chunks], kind="stable")
        back[in_backward[1:]] = freed[chunks][in_backward[:-1]]
        gone[ours] = blocks["bytes"].to_numpy()[ours]
        starts[ours] = first_made[chunk]
        ends[ours] = back[chunk]
    return gone, starts, ends


@rule("FD102", "several copies of the logits", "blocks", "layers", "stacks")
def logits_copies(case: Case) -> Iterator[Fault]:
    """A job holds several copies of the logits: from the product, in fp32, shifted, as log-probabilities.

    A variable, or an output object, that outlives the cast keeps the logits from before it. With a large vocabulary
    these are the largest tensors of the job.

    The rule sees the result of a product outside of the repeated layers, as large as what the loss saves, and three or
    more blocks with half, once or twice its size when the loss is computed, without which the peak is lower.

    **Mend**: shift the labels and not the logits, return the loss from the function that casts, so that no name keeps
    what is cast, or use a fused or chunked cross-entropy.

    Reported in ms-swift#6966 (46.4 GiB where 18.5 are needed).
    """
    evidence = case.evidence
    blocks = evidence.blocks
    sizes = evidence.blocks["bytes"].to_numpy()
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    outside = case.is_outside & evidence.phase("forward") & ~evidence.category("workspace")
    losses = np.flatnonzero(outside & evidence.operation(_LOSS))
    logits = np.flatnonzero(outside & evidence.operation(_PRODUCT))
    if not len(logits) or not len(losses):
        return
    loss = losses[sizes[losses] == sizes[losses].max()][-1]
    likely = [row for row in logits if made[row] < made[loss] and _is_copy(int(sizes[loss]), int(sizes[row]))]
    if not likely:
        return
    one = int(sizes[likely].max())
    first = likely[-1]
    # What forward made before the product, such as an embedding's result, is as large by chance.
    copies = np.flatnonzero(outside & (made >= made[first]) & (made <= made[loss]) & (freed > made[loss]) & (sizes > 0))
    copies = copies[[_is_copy(int(size), one) for size in sizes[copies]]]
    made_by = pd.MultiIndex.from_frame(blocks[["stack", "operation", "bytes"]].astype({"operation": str}))
    rest = copies[copies != loss]
    of_chunks = outside & made_by.isin(made_by[rest]) & (made < made[first]) & (freed > made[loss])  # FD101 has them
    if made_by[copies].nunique() < _FEWEST_COPIES or of_chunks.any():
        return
    gives = case.saved(np.where(outside & made_by.isin(made_by[rest]) & (made_by != made_by[loss]), sizes, 0))
    if case.is_worth(gives):
        operations = (str(name) for name in blocks["operation"].iloc[copies])
        names = ", ".join(dict.fromkeys(base_name(name) for name in operations if not name.startswith("unknown")))
        yield Fault(
            f"{len(copies)} copies of the logits ({names}) hold {format_bytes(int(sizes[copies].sum()))} when the loss "
            f"is computed; it needs {format_bytes(int(sizes[loss]))}",
            "let no name keep the logits from before the cast, shift the labels instead, or fuse the cross-entropy",
            case.line(int(blocks["stack"].iloc[rest[np.argmax(sizes[rest])]])),
            gives_bytes=(0, gives),
            advice="chunk-loss",
        )


def _is_copy(size: int, of: int) -> bool:
    return any(abs(size - ratio * of) <= _NEAR * ratio * of for ratio in _COPIES.values())


@rule("FD109", "results of an evaluation kept on the GPU", "blocks", "layers", "stacks")
def kept_evaluation(case: Case) -> Iterator[Fault]:
    """The outputs of many forwards without a backward, such as an evaluation's logits, are kept on the GPU together.

    Concatenating predictions at the end needs all of them at once, at the vocabulary's width.

    The rule sees three or more blocks of one line and size at the peak, that nothing saved for backward, each made in a
    forward of its own: repeated layers ran between them, and saved nothing either. Or a concatenation at the peak whose
    line has grown it by one size again and again in such forwards.

    **Mend**: reduce them first (`argmax`, the loss), move them to the host every few batches
    (`eval_accumulation_steps`), or count as they come.

    Reported in transformers#12878.
    """
    evidence = case.evidence
    blocks = evidence.blocks
    made, sizes, stack = (blocks[name].to_numpy() for name in ("alloc_event", "bytes", "stack"))
    of_no_step = evidence.category("temporary") | evidence.category("other")
    chosen = evidence.phase("forward", "other") & of_no_step & case.is_outside
    is_grown = chosen & evidence.operation(r"aten(?:\.|::)cat(?:\.|$)")
    at_peak = np.flatnonzero(chosen & blocks["at_peak"].to_numpy(bool))
    grown: set[int] = set()
    for _, same in reversed(list(pd.Series(at_peak).groupby([stack[at_peak], sizes[at_peak]]))):
        rows = same.to_numpy()
        every = chosen & (stack == stack[same.iloc[0]])
        if is_grown[rows[0]]:  # the last one, which is the largest
            if stack[rows[0]] in grown:
                continue
            grown.add(stack[rows[0]])
            of_step = is_grown & every & (blocks["step"] == blocks["step"].iloc[rows[0]]).to_numpy()
            rows = np.flatnonzero(of_step & (sizes <= sizes[rows[0]]))
            by = np.diff(sizes[rows])
            if len(by) < 2 or (by <= 0).any() or by.max() - by.min() > _NEAR * by.max():
                continue
            size = int(by[0])
            number = int(sizes[rows[-1]] // by[0])
            held = evidence.at_peak(of_step)
        else:
            size = int(sizes[rows[0]])
            number = len(rows)
            held = size * number
            every &= sizes == size
            every[rows[0]] = False
        if _num_forwards(case, made[rows]) < _FEWEST_COPIES or not case.is_worth(held - size):
            continue
        gives = case.saved(np.where(every, sizes, 0))
        yield Fault(
            f"the outputs of {number} forwards without a backward, {format_bytes(size)} each, hold "
            f"{format_bytes(held)} at the peak",
            "keep argmax or the loss of each batch, or move outputs to the host as they come",
            case.line(int(stack[rows[0]])),
            gives_bytes=(gives, gives),
        )


def _num_forwards(case: Case, made: Array) -> int:
    """How many of some blocks follow a forward of repeated layers of their own; 0 if these saved for backward."""
    blocks = case.evidence.blocks
    events = blocks["alloc_event"].to_numpy()
    inside = ~case.is_outside
    saved = np.sort(events[inside & case.is_saved])
    if len(np.unique(np.searchsorted(saved, made))) > 1:
        return 0
    return len(np.unique(np.searchsorted(np.sort(events[inside & case.evidence.phase("forward")]), made)))


@rule("FD118", "logits unpacked or gathered on all ranks", "blocks", "layers", "kernels", "launches", "work", "stacks")
def dense_logits(case: Case) -> Iterator[Fault]:
    """The loss runs over more logits than the rank computed: over padding, or over those of other ranks.

    Sequences that were packed, or split over a context- or tensor-parallel group, are brought back to a dense batch
    before log-probabilities are taken, at the vocabulary's width.

    The rule compares elements: those of all products outside of the repeated layers in a step's forward, and those that
    the loss saved, at four bytes each. It sees a tenth more, written by an all-gather, joined of its parts, or put
    into a buffer of zeros.

    **Mend**: take log-probabilities of the packed, local logits, and unpack or gather these: one number a token. Labels
    can be packed instead; a vocabulary-parallel loss needs no gather.

    Reported in SkyRL#1751 (41.31 GiB allocated where 29.97 are enough).
    """
    evidence, kernels = case.evidence, case.kernels
    blocks = evidence.blocks
    sizes = evidence.blocks["bytes"].to_numpy()
    if not len(kernels):
        return
    products = kernels[
        (kernels["kind"] == "product").to_numpy()
        & case.in_phase(kernels, "forward")
        & ~kernels["recompute"].to_numpy(bool)
        & case.outside_layers[kernels["layer"].to_numpy()]
    ]
    computed = int((products["m"] * products["n"] * products["batch"].clip(lower=1)).sum())
    outside = case.is_outside & evidence.phase("forward")
    losses = blocks[outside & evidence.operation(_LOSS)]
    if not computed or not len(losses):
        return
    of_step = losses.groupby(["stack", losses["operation"].astype(str), "step"])["bytes"].sum()
    if not case.is_worth(int(of_step.max())):  # sizes of small blocks are rounded up
        return
    ratio = computed / (int(of_step.max()) / 4)
    large = outside & (sizes >= _HALF_A_LOSS * losses["bytes"].max())
    calls = evidence.last_calls
    gathered = calls.loc[calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward"), "bytes_out"]
    joined = evidence.operation(r"\.cat\.") & np.isin(sizes, gathered)  # of those of all ranks, along the vocabulary
    dense = large & (evidence.operation(_DENSE) | joined)
    held = evidence.at_peak(large)
    if ratio > _MOST_COMPUTED or not dense.any() or not case.is_worth(held * (1 - ratio)):
        return
    yield Fault(
        f"the loss runs over {1 / ratio:.1f} times the logits that the rank computed: {format_bytes(held)} at the peak",
        "take log-probabilities of the packed, local logits, and unpack or gather these",
        case.line(int(blocks["stack"].to_numpy()[dense][-1])),
        gives_bytes=(0, case.saved(np.where(large, sizes * (1 - ratio), 0))),
    )
