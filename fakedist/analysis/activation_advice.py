"""Advice on what a model saves for backward: recompute it, keep it on the host, or have less of it at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fakedist.analysis.evidence import (
    Change,
    Evidence,
    Passes,
    Price,
    Saving,
    freed_early,
    kept_gradients,
    matches,
    owners,
    passes_of,
    recompute_price,
    recomputed,
    stacks,
)
from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.parallel_advice import Flow, Megatron, is_torch_pipeline, micro_batch, sends
from fakedist.analysis.recording import Array
from fakedist.units import format_bytes

_NUM_STACKS = 2  # at most this many stacks of layers get advice
_EVERY = {2: "every second layer of ", 3: "every third layer of ", 4: "every fourth layer of "}
#: Operations whose results are worth keeping: torch's own choice for selective checkpointing, but for ``bmm``, whose
#: results are attention scores where no fused attention runs.
_KEPT = r"^aten\.(?:mm|addmm|_scaled_mm|convolution)\.|attention_?(?:forward)?\.|_attention\w*\."
_BACKWARD = "backward"
_COMPILED = r"^inductor::"
_IN_COMPILED = (
    ". Of compiled layers the partitioner of torch.compile decides when to recompute what. With context_fn="
    "functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])"
    " they keep their products, which saves less, and takes less time"
)
#: ``save_on_cpu`` copies a tensor as often as it is saved, such as the input of three projections: at most twice here.
_MOST_COPIES = 2
_NOT_OF_WEIGHTS = r"addmm|attention|softmax|nll_loss|cross_entropy|gelu|silu|relu|dropout"
_NOT_OF_BATCH = r"arange|zeros|ones|full|empty|rand|tril|triu|\.eye|\.cos\.|\.sin\.|\.(?:sum|mean|var\w*|prod|cumsum)\."
_MOST_PAIRED = 300  # sizes of parameters
_COPIES = r"_to_copy|copy_|clone|_weight_norm"
_LOSS_PIECES = 8
_LOSS = r"log_softmax|nll_loss|cross_entropy"
_PRODUCT = r"\.(?:mm|addmm|bmm|_scaled_mm)\."
#: A chunk's products read the output layer's weight three times and write its gradient, which adding reads twice and
#: writes.
_WEIGHT_MOVES = 7
#: Products of an eighth of the rows take this much longer in all; a kernel takes this long at least; pieces of 2-byte
#: elements become one tensor so many times slower than a copy (see ``cost_model``).
_SMALLER, _LAUNCH_US, _SLOW_CONCATENATION = 0.25, 3.0, 4


def checkpoint_layers(evidence: Evidence) -> Iterator[Change]:
    """Activations saved inside repeated layers that a checkpoint would recompute, or the host could hold."""
    held = []
    saved = evidence.category("activation") & ~evidence.blocks["recompute"].to_numpy()
    of_block = evidence.blocks["layer"].to_numpy()
    for fold in stacks(evidence):
        owner = owners(evidence.layers, fold.layers)
        held.append((evidence.at_peak(saved & (owner[of_block] >= 0)), fold, owner))
    megatron = Megatron.of(evidence)
    for bytes_, fold, owner in sorted(held, key=lambda row: -row[0])[:_NUM_STACKS]:
        passes = passes_of(evidence, owner)
        if passes is None:
            continue
        # The partitioner of torch.compile decides what compiled layers save: which products is not known.
        is_compiled = bool(evidence.operation(_COMPILED)[passes.blocks].any())
        if megatron is not None:
            yield from megatron.recompute(evidence, fold, owner, passes)
        else:
            yield from _checkpoints(evidence, fold, owner, passes, bytes_, is_compiled=is_compiled)
            if not is_compiled:
                yield from _selective(evidence, fold, owner, passes)
        if not is_compiled:
            yield from _offload(evidence, fold, owner, passes, megatron)


def _checkpoints(
    evidence: Evidence, fold: Fold, owner: Array, passes: Passes, bytes_: int, *, is_compiled: bool
) -> Iterator[Change]:
    """Whole layers recomputed: all of them, or every second, third or fourth.

    Compiled layers recompute at most what runs now, each result perhaps only where it is used.
    """
    text = (
        f"activations saved inside these {len(fold.layers)} layers hold {format_bytes(bytes_)} at the peak; with "
        "torch.utils.checkpoint each layer keeps only its output and recomputes the rest in backward"
    )
    if is_compiled:
        text += _IN_COMPILED
    for every, words in {1: "", **_EVERY}.items():
        if every >= len(fold.layers):
            continue
        least = recomputed(evidence, passes, passes.owner % every == 0)
        most = freed_early(evidence, passes, least)
        price = recompute_price(evidence, passes, (owner >= 0) & (owner % every == 0))
        if is_compiled:
            most, _ = _offloaded(evidence, passes, passes.owner % every == 0)
            price = None if price is None else replace(price, low_us=0.0)
        yield Change(
            "checkpoint",
            f"checkpoint {words}{fold.name} ({fold.class_name})",
            text,
            most or least,
            least if most else None,
            subjects=frozenset({fold.name}),
            price=price,
            is_variant=every > 1,
        )


def _selective(evidence: Evidence, fold: Fold, owner: Array, passes: Passes) -> Iterator[Change]:
    """Layers that keep the results of matrix products and fused attention, and recompute the rest."""
    blocks = evidence.blocks
    is_kept = evidence.operation(_KEPT) & ~evidence.operation(_BACKWARD)
    if not is_kept[passes.blocks].any():
        return
    dropped = recomputed(evidence, passes, np.ones(len(passes.owner), bool))
    assert dropped.starts is not None
    assert dropped.ends is not None
    gone = np.where(is_kept, 0, dropped.bytes_)
    starts, ends = dropped.starts, dropped.ends
    # Results that autograd did not save, such as those of a layer's last product, are kept until backward too.
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    of_pass = np.searchsorted(passes.first_event, made, "right") - 1
    is_inside = (of_pass >= 0) & (owner[blocks["layer"].to_numpy()] == passes.owner[of_pass])
    is_forward = evidence.phase("forward") & ~blocks["recompute"].to_numpy()
    is_extra = is_kept & is_forward & is_inside & evidence.category("temporary")
    back = passes.back_event[of_pass] - 1
    gone[is_extra] = -blocks["bytes"].to_numpy()[is_extra]
    starts[is_extra], ends[is_extra] = freed[is_extra], np.maximum(back, freed)[is_extra]
    is_ours = is_kept & is_inside & is_forward
    names = ", ".join(f"torch.ops.{name}" for name in sorted(set(blocks.loc[is_ours, "operation"].astype(str))))
    saving = Saving(gone, starts, ends)
    yield Change(
        "selective-checkpoint",
        f"checkpoint {fold.name} ({fold.class_name}), but keep products and attention",
        "with torch.utils.checkpoint.checkpoint(layer, ..., use_reentrant=False, context_fn=functools.partial("
        f"create_selective_checkpoint_contexts, [{names}])) each layer keeps those results and recomputes the rest",
        saving,
        saving,  # what is cut from larger blocks may change
        subjects=frozenset({fold.name}),
        price=recompute_price(evidence, passes, owner >= 0, _KEPT),
    )


def _offload(
    evidence: Evidence, fold: Fold, owner: Array, passes: Passes, megatron: Megatron | None
) -> Iterator[Change]:
    """Activations that the host holds between a layer's forward and backward."""
    if megatron is not None and not megatron.can_offload:
        return
    for every, words in {1: "", 2: "every second layer of "}.items():
        if every >= len(fold.layers) or (megatron is not None and every > 1):
            continue
        chosen, layers = passes.owner % every == 0, (owner >= 0) & (owner % every == 0)
        if megatron is not None:  # the last layer stays
            last = len(fold.layers) - 1
            chosen, layers = passes.owner < last, (owner >= 0) & (owner < last)
        last_step = (passes.step == passes.step.max()) & chosen
        bytes_ = int(evidence.blocks["bytes"].to_numpy()[passes.blocks[last_step[passes.pass_of]]].sum())
        host = bytes_ * evidence.setup.gpus_per_node
        price = _link_price(evidence, bytes_, layers)
        if price is None:  # a saving without the time of its copies says nothing
            return
        how = "torch.autograd.graph.save_on_cpu(pin_memory=True) around these layers"
        flags = ""
        if megatron is not None:
            how = megatron.offload_flags(len(fold.layers) - 1)
            flags = f": {how}"
        yield Change(
            "offload",
            f"offload the saved activations of {words}{fold.name} ({fold.class_name}){flags}",
            f"{how} keeps {format_bytes(bytes_)} a step on the host, {format_bytes(host)} for the GPUs of a node; it "
            "also copies parameters, and a tensor as often as it is saved. Saved-tensor hooks that copy activations "
            "once, on a stream of their own, hide what the layers' compute is long enough for",
            *_offloaded(evidence, passes, chosen),
            subjects=frozenset({fold.name}),
            price=price,
            is_variant=every > 1,
        )


def _offloaded(evidence: Evidence, passes: Passes, chosen: Array) -> tuple[Saving, Saving]:
    """The most and the least that offloading saves.

    At most, the GPU holds a block only when it is made and when backward uses it. At least, it leaves once its layer's
    forward has ended (an output, the next layer's), and comes back one layer before its own.
    """
    blocks, num_events = evidence.blocks, len(evidence.allocated)
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    is_chosen = chosen[passes.pass_of]
    inside, of = passes.blocks[is_chosen], passes.pass_of[is_chosen]
    gone = np.zeros(len(blocks))
    gone[inside] = blocks["bytes"].to_numpy()[inside]
    starts, ends = made.copy(), freed.copy()
    starts += 1
    ends -= freed < num_events
    inputs = _inputs(evidence, passes, chosen)
    with_inputs = gone.copy()
    with_inputs[inputs] = blocks["bytes"].to_numpy()[inputs]
    most = Saving(with_inputs, starts.copy(), ends.copy())
    starts, ends = made.copy(), freed.copy()
    is_output = np.isin(inside, passes.last)
    starts[inside] = passes.end_event[np.where(is_output, passes.next[of], of)] + 1
    back = passes.back_event[passes.next[of]]
    ends[inside] = back - (back < num_events)
    return most, Saving(gone, starts, ends)


def _inputs(evidence: Evidence, passes: Passes, chosen: Array) -> Array:
    """The activations that a stack's first layers were given."""
    saved = np.flatnonzero(evidence.category("activation"))
    first = passes.blocks[np.flatnonzero(np.diff(passes.pass_of, prepend=-1))]
    before = np.searchsorted(saved, first[chosen & (passes.owner == 0)]) - 1
    return np.asarray(saved[before[before >= 0]])


def _link_price(evidence: Evidence, bytes_: int, layers: Array) -> Price | None:
    """Copies to the host and back: at most one after the other with compute, at least what exceeds compute."""
    bandwidth = evidence.setup.host_bandwidth
    forward, backward = (evidence.kernels_us((phase,), layers) for phase in ("forward", "backward"))
    if not bandwidth or forward is None or backward is None:
        return None
    one_way = bytes_ / bandwidth * 1e6
    step = evidence.blocks["step"].to_numpy()
    is_once = (step == 0) | (step == step.max())  # FSDP gathers them again in each step
    of_layers = evidence.category("parameter") & layers[evidence.blocks["layer"].to_numpy()] & is_once
    parameters = float(evidence.blocks["bytes"].to_numpy()[of_layers].sum()) / bandwidth * 1e6
    high = 2 * (_MOST_COPIES * one_way + parameters)
    return Price(max(one_way - forward, 0.0) + max(one_way - backward, 0.0), high, "copies over the host link")


def halve_micro_batch(evidence: Evidence) -> Iterator[Change]:
    """A smaller micro-batch and as many more of them: what scales with the batch is known only by bounds."""
    flow = Flow.of(evidence)
    if flow is not None and flow.in_flight == flow.number:  # all may be in flight again
        return
    batch, flag = micro_batch_of(evidence)
    if batch < 2:
        return
    pieces = next(number for number in range(2, batch + 1) if batch % number == 0)
    share = 1 - 1 / pieces
    blocks = evidence.blocks
    bytes_, starts = blocks["bytes"].to_numpy(), blocks["alloc_event"].to_numpy().copy()
    ends = blocks["free_event"].to_numpy().copy()
    may, surely = blocks_of_batch(evidence, batch)
    if not surely.any():
        return
    # Gradients stay allocated from the first micro-batch's backward on, as they do in a pipeline already.
    held, first = kept_gradients(evidence) if flow is None else (np.zeros(0, int), np.zeros(0, int))
    starts[held], ends[held] = first, starts[held] + 1
    most, least = (np.where(mask, bytes_ * share, 0) for mask in (may, surely))
    most[held] = least[held] = -bytes_[held]
    size = batch // pieces
    how = f": {flag} {size}" if flag else ""
    title = f"micro-batches of {size} instead of {batch}, accumulated {pieces} times as often"
    kept = "and gradients are then held through forward"
    if flow is not None:
        title = f"{pieces * flow.number} micro-batches of {size} instead of {flow.number} of {batch}"
        how = how or f": n_microbatches={pieces * flow.number}" * is_torch_pipeline(evidence)
        kept = f"as long as {flow.in_flight} of them are in flight, as now"
    yield Change(
        "micro-batch",
        title + how,
        f"what a micro-batch saves for backward falls to 1/{pieces}, and so may temporaries; parameters, optimizer "
        f"state and gradients do not, {kept}. The same products run on fewer rows "
        "each: no sooner than now together, and at most as long each; launches multiply",
        Saving(most, starts, ends),
        Saving(least, starts, ends),
        line=evidence.main_line(surely),
        price=_split_price(evidence, pieces),
    )


def micro_batch_of(evidence: Evidence) -> tuple[int, str]:
    """Samples of one forward in the last step, and the flag of the command line that has them; 0 if not known."""
    megatron, flow = Megatron.of(evidence), Flow.of(evidence)
    if megatron is not None:
        return megatron.micro_batch, "--micro-batch-size"
    return (_micro_batch(evidence), "") if flow is None else micro_batch(evidence, flow)


def blocks_of_batch(evidence: Evidence, batch: int) -> tuple[Array, Array]:
    """Masks of the blocks whose size may follow that of the micro-batch, and of those whose size surely does."""
    working = evidence.phase("forward", "backward")
    activation = evidence.category("activation")
    is_input = evidence.phase("other") & (evidence.blocks["step"].to_numpy() > 0)  # batches, masks
    may = (activation | evidence.category("temporary")) & (working | is_input)
    if evidence.splits_tensors:
        may |= evidence.category("communication") & working
    return may, may & _scales(evidence, activation & working, batch)


def _micro_batch(evidence: Evidence) -> int:
    """Samples of one forward in the last step; 0 if they are not known, as in a pipeline."""
    if not len(evidence.steps) or sends(evidence):
        return 0
    last = evidence.steps.iloc[-1]
    of_step = evidence.spans[evidence.spans["step"] == last["step"]]
    number = int((of_step["phase"].astype(str) == "backward").sum())
    samples = int(last["samples"])
    return samples // number if number and samples % number == 0 else 0


def _scales(evidence: Evidence, activations: Array, batch: int) -> Array:
    """Blocks that surely scale with the batch.

    The batch divides their size, and it is that of a layer's result that is saved. What is as large as something made
    of parameters (a cast, a gradient, a normed weight) scales only if its operation has no weight as its result. What
    a reduction works in, and what is made of nothing (a mask, positions), need not scale.
    """
    requested = evidence.blocks["requested_bytes"].to_numpy()
    is_as_weights = np.isin(requested, _sizes_of_weights(evidence, requested))
    is_linear = evidence.layers["class_name"].astype(str).str.contains("Linear").to_numpy()
    in_linear = is_linear[evidence.blocks["layer"].to_numpy()] & evidence.phase("forward")
    is_result = evidence.operation(_NOT_OF_WEIGHTS) | (evidence.operation(_PRODUCT) & in_linear)
    may = (is_result | ~is_as_weights) & ~evidence.operation(_NOT_OF_BATCH) & (requested > 0)
    own = may & activations & (requested % batch == 0)
    return np.asarray(may & np.isin(requested, np.unique(requested[own])))


def _sizes_of_weights(evidence: Evidence, requested: Array) -> Array:
    """Bytes of parameters, whole or sharded, in any type, in parts of up to four, and of two or three together."""
    of_parameters = np.unique(requested[evidence.category("parameter")])
    if len(of_parameters) <= _MOST_PAIRED:
        pairs = (of_parameters[:, None] + number * of_parameters for number in (1, 2))
        of_parameters = np.unique(np.concatenate([of_parameters, *(pair.ravel() for pair in pairs)]))
    sizes = {1, *(evidence.groups["size"].tolist() if len(evidence.groups) else ())}
    factors = {size * type_ / part for size in sizes for type_ in (0.25, 0.5, 1, 2) for part in (1, 2, 3, 4)}
    return np.unique(np.concatenate([of_parameters * factor for factor in factors]))


def _split_price(evidence: Evidence, pieces: int) -> Price | None:
    """Each kernel takes between its part and as long as now; one that its launch limits takes as long."""
    kernels = evidence.kernels
    whole = evidence.kernels_us(("forward", "backward"))
    if kernels is None or whole is None:
        return None
    runs = kernels["phase"].isin(("forward", "backward"))
    launch = (kernels["bound"].astype(str) == "launch") & runs & ~kernels["is_call"]
    low = float(kernels.loc[launch, "duration_us"].sum())
    again = float(kernels.loc[kernels["recompute"].astype(bool) & runs & ~kernels["is_call"], "duration_us"].sum())
    calls = evidence.last_calls
    calls_us = evidence.calls_us(calls.loc[calls["phase"].isin(("forward", "backward")), "sequence"])
    more = pieces - 1
    return Price(low * more, (whole + again + calls_us) * more, "more launches and smaller kernels")


def chunk_loss(evidence: Evidence) -> Iterator[Change]:
    """Full logits and their gradient, which an unfused cross entropy holds several times over."""
    is_loss = evidence.operation(_LOSS)
    stack = evidence.blocks["stack"].to_numpy()
    lines = {evidence.lines[number] for number in np.unique(stack[is_loss])} - {""}
    # The cast of the logits is on the same line as the loss, where the output layer and its casts may be, too.
    on_line = np.array([line in lines for line in evidence.lines])[stack]
    largest = _largest(evidence, is_loss)
    is_as_large = np.isin(evidence.blocks["requested_bytes"].to_numpy(), (largest, largest // 2))
    chosen = is_loss | (evidence.operation("_to_copy") & on_line & is_as_large)
    if not chosen.any():
        return
    held = evidence.at_peak(chosen)
    where = f" ({sorted(lines)[0].partition(' (')[0].rpartition('/')[2]})" if lines else ""
    sizes, line = evidence.blocks["bytes"].to_numpy(), evidence.main_line(chosen)
    megatron = Megatron.of(evidence)
    also = "; --cross-entropy-loss-fusion" if megatron and not megatron.has("cross-entropy-loss-fusion") else ""
    text = (
        f"the loss{where} holds {format_bytes(held)} of full logits at the peak. At least: the loss alone in chunks of "
        "the logits, each under torch.utils.checkpoint, where the logits and their gradient stay whole. At most: the "
        "output layer in the chunks, too, or a fused linear cross entropy. Sharded over the vocabulary (loss parallel) "
        f"it needs a fraction of that{also}"
    )
    in_stacks = np.zeros(len(evidence.layers), bool)
    for fold in stacks(evidence):
        in_stacks |= owners(evidence.layers, fold.layers) >= 0
    is_logits = _logits(evidence, is_loss) & ~in_stacks[evidence.blocks["layer"].to_numpy()]
    yield Change(
        "fuse-loss",
        f"compute the loss in {_LOSS_PIECES} chunks, for the most with the output layer in the chunks",
        text,
        Saving(np.where(chosen | is_logits, sizes * (1 - 1 / _LOSS_PIECES), 0)),
        _loss_alone(evidence, is_loss, chosen, is_logits),
        line=line,
        subjects=frozenset({"loss"}),
        price=_chunks_price(evidence, is_loss, is_logits, in_stacks),
    )
    gathered = _gathered_logits(evidence, is_loss)
    if gathered is None:
        return
    group, gathered_bytes = gathered
    is_copy = (evidence.blocks["requested_bytes"].to_numpy() == gathered_bytes) & evidence.phase("forward", "backward")
    size, label = evidence.group_size(group), evidence.group_label(group)
    yield Change(
        "loss-parallel",
        f"keep the logits sharded over the {size:,} ranks of {label} (loss parallel)",
        f"{label} gathers the logits for the loss{where}; torch.distributed.tensor.parallel.loss_parallel() with "
        "output_layouts=Shard(-1), use_local_output=False leaves each rank its part of the vocabulary",
        Saving(np.where(chosen | is_copy, sizes * (1 - 1 / size), 0)),
        Saving(np.where(chosen, sizes * (1 - 1 / size), 0)),
        line=line,
        subjects=frozenset({"loss"}),  # the price, small all-reduces and the host's work on DTensors, is not known
    )


def _chunks_price(evidence: Evidence, is_loss: Array, is_logits: Array, in_stacks: Array) -> Price | None:
    """The most that chunks of the loss cost: what runs outside of the stacks once more, and what chunks do not divide.

    With the output layer in the chunks, each casts the weight again, reads it in three products, writes its whole
    gradient, and adds it to the others'. Without, pieces of the logits' gradient become one tensor.
    """
    kernels, working = evidence.kernels, ("forward", "backward")
    again = evidence.kernels_us(("forward",), ~in_stacks)
    if kernels is None or again is None:
        return None
    requested = evidence.blocks["requested_bytes"].to_numpy()
    is_product = evidence.operation(_PRODUCT)
    made_logits = is_logits & is_product & evidence.phase("forward")
    is_output = np.zeros(len(evidence.layers), bool)
    is_output[evidence.blocks["layer"].to_numpy()[made_logits]] = True
    weight = requested[is_product & is_output[evidence.blocks["layer"].to_numpy()] & evidence.phase("backward")]

    def of_output(phases: Sequence[str], operations: str) -> float:
        every, others = (evidence.kernels_us(phases, is_output, without) for without in ("", operations))
        return (every or 0.0) - (others or 0.0)

    of_losses = kernels[matches(kernels["operation"], lambda name: re.search(_LOSS, name) is not None)]
    losses = of_losses.loc[of_losses["phase"] == "forward", "duration_us"]
    # The loss reads the logits, and writes as many bytes.
    us_per_byte = float(losses.max()) / (2 * max(_largest(evidence, is_loss), 1)) if len(losses) else 0.0
    num_losses = int((losses > losses.max() / 2).sum())
    own = (is_output[kernels["layer"]] & kernels["phase"].isin(working)) | kernels.index.isin(of_losses.index)
    more = _LOSS_PIECES - 1
    launches = 2 * more * float(kernels.loc[own & ~kernels["is_call"], "duration_us"].clip(upper=_LAUNCH_US).sum())
    moved = _WEIGHT_MOVES * int(weight.max(initial=0)) * us_per_byte * num_losses
    inside = more * (of_output(("forward",), _COPIES) + moved) + _SMALLER * 2 * of_output(working, _PRODUCT)
    gradient = int(requested[made_logits].max(initial=0)) or _largest(evidence, is_loss)
    pieced = _SLOW_CONCATENATION * 2 * gradient * us_per_byte * num_losses
    of_layers = is_output.copy()
    of_layers[of_losses["layer"]] = True
    chunked = of_layers & ~in_stacks
    on_host = _LOSS_PIECES * (
        sum(evidence.host_us(phase, chunked) for phase in working) + evidence.checkpoint_us(chunked, 1)
    )
    on_gpu = again + max(inside, pieced) + launches
    return Price(0.0, max(on_gpu, on_host), "logits computed again, and in pieces")


def _largest(evidence: Evidence, is_loss: Array) -> int:
    """Bytes of the logits, as large as the largest that the loss makes."""
    return int(evidence.blocks["requested_bytes"].to_numpy()[is_loss].max(initial=0))


def _logits(evidence: Evidence, is_loss: Array) -> Array:
    """Blocks of the output layer that are as large as the loss's logits, in its type or one of half the size.

    Their parts before a tensor-parallel gather count in forward. A product in backward is not of the logits.
    """
    requested = evidence.blocks["requested_bytes"].to_numpy()
    largest = _largest(evidence, is_loss)
    parts = [whole // evidence.group_size(of) for of in evidence.splits_tensors for whole in (largest, largest // 2)]
    backward = evidence.phase("backward") & ~evidence.operation(_PRODUCT)
    is_logits = np.isin(requested, (largest, largest // 2)) & (evidence.phase("forward") | backward)
    is_logits |= np.isin(requested, parts) & evidence.phase("forward")
    is_kind = evidence.category("activation") | evidence.category("temporary") | evidence.category("communication")
    return np.asarray(is_logits & is_kind & ~is_loss & (requested > 0))


def _loss_alone(evidence: Evidence, is_loss: Array, chosen: Array, is_logits: Array) -> Saving:
    """The least that chunks of the loss save: the logits stay until its backward has ended, and so does the gradient.

    The gradient grows from the first chunk on, and counts twice when its pieces become one tensor.
    """
    blocks = evidence.blocks
    sizes, made, freed = (blocks[name].to_numpy() for name in ("bytes", "alloc_event", "free_event"))
    largest = _largest(evidence, is_loss)
    is_whole = chosen & (blocks["requested_bytes"].to_numpy() >= largest // 2)
    is_cast = is_whole & ~is_loss
    gone = np.where(chosen, sizes * (1 - 1 / _LOSS_PIECES), 0)
    starts, ends = made.copy(), freed.copy()
    # What the forward saves has the logits' lifetime; a script may hold them as long by itself.
    forward = evidence.phase("forward")
    saved = np.flatnonzero(is_whole & is_loss & forward)
    share = 2 if (is_cast & forward).any() else 1
    logits = np.flatnonzero(is_logits & forward & ~chosen)
    for block in saved:
        if not ((made[logits] < made[block]) & (freed[logits] >= freed[block])).any():
            gone[block] -= sizes[block] / share
    back = np.flatnonzero(is_whole & evidence.phase("backward"))
    if len(back):
        is_last = is_cast[back] if is_cast[back].any() else evidence.operation("log_softmax")[back]
        begins = np.maximum.accumulate(np.where(np.append(True, is_last[:-1]), np.arange(len(back)), 0))
        gradients = back[is_last]
        gone[gradients] = -sizes[gradients]
        starts[gradients], ends[gradients] = made[back[begins[is_last]]], made[gradients] + 1
    return Saving(gone, starts, ends)


def _gathered_logits(evidence: Evidence, is_loss: Array) -> tuple[int, int] | None:
    """The tensor-parallel group whose all-gather in forward made logits of the loss's size, and its bytes."""
    largest = _largest(evidence, is_loss)
    calls = evidence.last_calls
    gathers = calls[calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")]
    whole = gathers[gathers["bytes_out"].isin((largest, largest // 2, largest * 2)) & (gathers["bytes_out"] > 0)]
    for group, bytes_ in zip(whole["group"].tolist(), whole["bytes_out"].tolist(), strict=True):
        if group in evidence.splits_tensors and evidence.group_size(int(group)) > 1:
            return int(group), int(bytes_)
    return None
