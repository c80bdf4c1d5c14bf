"""Rules of memory: what a job holds at its peak without need."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import matches, owners, stacks
from fakedist.analysis.recording import Array
from fakedist.analysis.state_advice import unfused_temporaries
from fakedist.findings.case import Case, base_name
from fakedist.findings.registry import Fault, rule
from fakedist.rundir.notes import counted
from fakedist.units import format_bytes

_FEWEST_COMMUNICATORS = 4
_FEWEST_TOGETHER = 3
#: Two bytes an element in the parameters, and four in the buffer, make a buffer of twice the parameters.
_BUCKET = 2.05
#: The optimizer's temporaries as a share of the peak, from which on they make it.
_OPTIMIZERS_SHARE = 0.1
#: Temporaries of an optimizer that updates one parameter after the other, in copies of the largest parameter.
_MOST_OF_A_PARAMETER = 4
_POOLS_SHARE = 1.5
_ADAPTERS_SHARE = 0.25
_FEWEST_ADAPTERS = 4
_UNUSED_SHARE = 0.15
#: The allocator takes 20 MiB at once for blocks of 1 to 10 MiB, so a small job always has some free: up to 222 MiB, or
#: 12 %, in healthy jobs of DDP and FSDP2.
_LEAST_UNUSED_BYTES = 200 << 20
#: A residual stream in fp32 is usual under autocast; its casts are worth a finding from this share of the peak on.
_CASTS_SHARE = 0.05


@rule("FD103", "gradients that are not sharded between micro-batches", "blocks", "spans", "calls", "groups")
def whole_gradients(case: Case) -> Iterator[Fault]:
    """Between micro-batches, a rank holds whole gradients where each could hold its shard.

    `set_requires_gradient_sync(False)` and `no_sync` leave out the reduce-scatter of all but the last micro-batch, and
    so leave the gradients whole: as much memory as the whole model's gradients, instead of a share of them.

    The rule sees gradients that stay from one micro-batch's backward into the next one's forward and are more than what
    the step's reduce-scatters leave.

    **Mend**: reduce-scatter in each micro-batch (leave `set_requires_gradient_sync` True): more communication, and
    gradients of a shard's size.

    Reported in tnt#1057 (+377,487,360 bytes).
    """
    evidence = case.evidence
    calls = evidence.last_calls
    scatters = calls[calls["operation"].str.startswith("reduce_scatter") & (calls["phase"] != "forward")]
    sizes = [evidence.group_size(group) for group in scatters["group"]]
    if not len(scatters) or max(sizes) < 2:
        return
    blocks = evidence.blocks
    recorded = min(int(scatters["step"].max()), int(evidence.blocks["step"].max()))
    # FSDP1 hands the gradients that it kept to the reduce-scatter as they are.
    kept_in = evidence.category("gradient") | evidence.category("communication")
    whole = kept_in & evidence.phase("backward") & _outlives_a_forward(case)
    kept = whole & (blocks["step"] == recorded).to_numpy()
    held = int(blocks["bytes"].to_numpy()[kept].sum())
    shard = int(scatters["bytes_out"].sum())
    if held < 1.5 * shard:
        return
    size = int(np.average(sizes, weights=scatters["bytes_in"]))
    gives = case.saved(np.where(whole, blocks["bytes"] * (1 - 1 / size), 0))
    if case.is_worth(held * (1 - 1 / size)):
        yield Fault(
            f"whole gradients, {format_bytes(held)} ({held:,} bytes), stay between micro-batches; sharded over "
            f"{size:,} ranks they would be {format_bytes(held // size)}",
            "reduce-scatter the gradients of each micro-batch: set_requires_gradient_sync(True), no no_sync()",
            gives_bytes=(0, gives),
        )


def _outlives_a_forward(case: Case) -> Array:
    """Mask of the blocks that were there when a forward began after them, in the same step."""
    evidence = case.evidence
    blocks, spans = evidence.blocks, evidence.spans
    of_forward = spans[case.in_phase(spans, "forward")]
    begins, steps = of_forward["first_event"].to_numpy(), of_forward["step"].to_numpy()
    following = np.searchsorted(begins, blocks["alloc_event"].to_numpy(), "right")
    is_there = following < len(begins)
    following = np.minimum(following, max(len(begins) - 1, 0))
    if not len(begins):
        return np.zeros(len(blocks), bool)
    same_step = steps[following] == blocks["step"].to_numpy()
    return np.asarray(is_there & same_step & (blocks["free_event"].to_numpy() > begins[following]))


@rule("FD104", "parameters that stay gathered", "blocks", "spans", "calls", "layers")
def gathered_parameters(case: Case) -> Iterator[Fault]:
    """Parameters that FSDP gathered stay whole after the forward, or even after the step.

    With `reshard_after_forward=False`, or where the parameters of a root or of a shared module are used outside of its
    forward, whole parameters stay until backward frees them. Those that nothing frees stay for good.

    The rule sees parameters that forward made, alive when backward begins (only repeated layers count: FSDP keeps the
    root's on purpose) or when the optimizer begins.

    **Mend**: `fully_shard(layer, reshard_after_forward=True)`; call modules by their forward, and reshard by hand
    (`module.reshard()`) what is used otherwise. A job that keeps layers whole on purpose (ZeRO-2) may ignore this rule.

    Reported in pytorch#147179 and pytorch#149029.
    """
    evidence = case.evidence
    calls, blocks = evidence.last_calls, evidence.blocks
    if not calls["operation"].str.startswith("all_gather").any():
        return
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    gathered = evidence.category("parameter") & evidence.phase("forward", "backward")
    for phase, chosen, until in (
        ("optimizer", gathered, "the optimizer's step"),
        ("backward", gathered & ~case.is_outside & evidence.phase("forward"), "backward"),
    ):
        begins = evidence.spans.loc[case.in_phase(evidence.spans, phase), "first_event"].to_numpy()
        if not len(begins):
            continue
        following = begins[np.minimum(np.searchsorted(begins, made), len(begins) - 1)]
        kept = chosen & (made < following) & (freed > following)
        rows = kept & blocks["at_peak"].to_numpy(bool)
        step = blocks["step"].to_numpy()
        held = max(
            (int(blocks["bytes"].to_numpy()[kept & (step == number)].sum()) for number in set(step[kept])), default=0
        )
        if phase == "backward" and _num_units(case, kept) < 2:  # backward uses the last one again at once
            continue
        if case.is_worth(int(blocks["bytes"].to_numpy()[rows].sum())):
            yield Fault(
                f"whole parameters, {format_bytes(held)}, gathered for forward, stay until {until}",
                "fully_shard(layer, reshard_after_forward=True), or reshard() after use outside of forward "
                "(DeepSpeed: stage3_max_reuse_distance)",
                evidence.main_line(kept),
                gives_bytes=None if phase == "backward" else (0, case.saved(np.where(kept, blocks["bytes"], 0))),
                costs_bytes=held,
                is_certain=phase == "optimizer",
                advice="reshard",
            )
            return


def _num_units(case: Case, kept: Array) -> int:
    """How many of FSDP's units parameters are of: each has a gather of its own. At most, of one step."""
    calls, blocks = case.evidence.calls, case.evidence.blocks
    gathers = np.sort(calls.loc[calls["operation"].astype(str).str.startswith("all_gather"), "op"].to_numpy())
    unit = np.searchsorted(gathers, blocks["op"].to_numpy()[kept], "right")
    return int(pd.Series(unit).groupby(blocks["step"].to_numpy()[kept]).nunique().max()) if kept.any() else 0


@rule("FD105", "the optimizer's temporaries make the peak", "blocks", "stacks")
def optimizer_temporaries(case: Case) -> Iterator[Fault]:
    """The peak is in the optimizer's step, and temporaries of the size of the parameters make it.

    The `foreach` implementation, torch's default where parameters are on a GPU, computes each intermediate for all
    parameters at once.

    The rule sees a peak in the optimizer's phase, a tenth or more of it temporaries of `foreach` operations, or of an
    optimizer of the job's own: more of these than four of the largest, which one parameter may need.

    **Mend**: `fused=True`, which needs none, or `foreach=False`, which needs those of one parameter at a time. An
    optimizer of your own can update one parameter after the other.

    Reported in pytorch/tutorials#2568 (five times the parameters where four are enough).
    """
    evidence = case.evidence
    if case.summary.peak_phase != "optimizer":
        return
    unfused = unfused_temporaries(evidence)
    own = evidence.phase("optimizer") & evidence.category("temporary") & ~unfused
    chosen = max(unfused, own, key=evidence.at_peak)
    held = evidence.at_peak(chosen)
    if not case.is_worth(held) or held < _OPTIMIZERS_SHARE * case.peak:
        return
    largest = int(evidence.blocks.loc[chosen & evidence.blocks["at_peak"].to_numpy(), "bytes"].max())
    if chosen is own and held <= _MOST_OF_A_PARAMETER * largest:
        return
    parameters = evidence.at_peak(evidence.category("parameter"))
    times = f", {held / parameters:.1f} times the parameters" if parameters else ""
    gives = case.saved(np.where(chosen, evidence.blocks["bytes"], 0))
    yield Fault(
        f"the peak is in the optimizer's step, and {format_bytes(held)} of it are temporaries{times}",
        "fused=True, or foreach=False" if chosen is unfused else "update one parameter after the other",
        evidence.main_line(chosen),
        gives_bytes=(gives if chosen is unfused else 0, gives),
        advice="fuse-optimizer" if chosen is unfused else "",
    )


@rule("FD106", "several communicators for the same ranks", "groups", "calls")
def repeated_communicators(case: Case) -> Iterator[Fault]:
    """Several process groups of the same ranks each have a communicator of their own.

    `new_group` and `init_device_mesh` make a group each time that they are called. NCCL takes buffers on the GPU for
    each one that communicates: hundreds of MiB, outside of PyTorch's allocator.

    The rule sees four or more groups with the same ranks that communicate.

    **Mend**: make a group once and hand it to the modules.

    Reported in pytorch#153302.
    """
    outside = case.summary.estimated_outside
    if outside is None:
        return
    groups = case.table("groups")
    used = groups.iloc[sorted(set(case.table("calls")["group"]) & set(range(len(groups))))]
    used = used[used["size"] > 1]
    for ranks, same in used.groupby("ranks", observed=True):
        if len(same) < _FEWEST_COMMUNICATORS:
            continue
        names = {str(row["description"] or row["name"]) for _, row in same.iterrows()}
        theirs = [piece for piece in outside.communicators if piece.group in names]
        if not theirs:
            continue
        low, high = (sorted(getattr(piece, name) for piece in theirs) for name in ("low_bytes", "high_bytes"))
        extra = sum(low[:-1]), sum(high[:-1])
        if case.is_worth(extra[1]):
            yield Fault(
                f"{len(same)} groups have the same {int(same['size'].iloc[0]):,} ranks ({ranks}), each with a "
                f"communicator: {format_bytes(sum(low))} to {format_bytes(sum(high))} outside of PyTorch, where one "
                f"takes {format_bytes(low[-1])} to {format_bytes(high[-1])}",
                "make the group once, and share it",
                costs_bytes=extra[0],
            )


@rule("FD107", "CUDA graphs with a pool each", "segments")
def graph_pools(case: Case) -> Iterator[Fault]:
    """CUDA graphs that do not run at the same time each keep a private pool of memory.

    A graph's memory stays its own between replays. Graphs that share a pool use the same memory one after the other.

    The rule sees two or more private pools, which together are half as large again as the largest of them.

    **Mend**: hand the pool of the first graph to the others (`torch.cuda.graph(graph, pool=first.pool())`) if they are
    replayed one after the other and their outputs are not used later; capture the largest first.

    Reported in rf-detr#1490 (38.2 GiB where 11.4 are enough).
    """
    segments = case.table("segments")
    segments = segments[
        (segments["moment"] == "peak_reserved").to_numpy() & (segments["private_pool"] != "").to_numpy()
    ]
    pools = segments.groupby("private_pool", observed=True)["bytes"].sum()
    if len(pools) < 2 or pools.sum() < _POOLS_SHARE * pools.max():
        return
    extra = int(pools.sum() - pools.max())
    if case.is_worth(extra):
        yield Fault(
            f"{len(pools)} private pools of CUDA graphs reserve {format_bytes(int(pools.sum()))}; the largest takes "
            f"{format_bytes(int(pools.max()))}",
            "let the graphs share a pool, the largest captured first",
            costs_bytes=extra,
            is_certain=False,
        )


@rule("FD108", "memory of a step that outlives it", "blocks", "steps", "spans", "stacks")
def outliving_a_step(case: Case) -> Iterator[Fault]:
    """Tensors of one step's forward are still there at the peak of a later step.

    A list of losses that keep their graph, or a variable such as `outputs` that the next step's forward replaces only
    when it is done, keeps activations alive.

    The rule sees blocks of a forward alive at the peak of a later step, from a line whose blocks outlive at least two
    steps, or are freed once it has made the next one. What the first step alone makes, such as a cache, does not count.
    It says nothing of several threads that train, since the step of one ends within that of another.

    **Mend**: keep `loss.detach()` or `loss.item()`, and `del` outputs at the end of the step.

    Reported in open-instruct#777.
    """
    evidence = case.evidence
    launches = case.table("launches") if case.has("launches") else None
    if launches is not None and launches.loc[case.in_phase(launches, "forward"), "thread"].nunique() > 1:
        return
    blocks, spans = evidence.blocks, evidence.spans
    step = blocks["step"].to_numpy()
    begins = spans.groupby("step")["first_event"].min()
    ends = pd.Series(begins.to_numpy()[1:], index=begins.index[:-1])
    end = ends.reindex(step).to_numpy("f8", na_value=np.inf)
    is_state = evidence.category("parameter") | evidence.category("optimizer_state") | evidence.category("gradient")
    is_state |= evidence.category("workspace") | evidence.category("communication")
    made_in = evidence.phase("forward") & (step > 0) & ~is_state
    outlives = made_in & (blocks["free_event"].to_numpy() > end)
    stack = blocks["stack"].to_numpy()
    num_steps = pd.Series(step[outlives]).groupby(stack[outlives]).nunique()
    # A block that the line makes again takes its name in the next step, so it was not for good.
    is_replaced = outlives & (blocks["free_event"] < len(evidence.allocated)).to_numpy()
    last_made = pd.Series(step[made_in]).groupby(stack[made_in]).max().reindex(stack).to_numpy()
    is_again = np.isin(stack, num_steps.index[num_steps >= 2]) | (is_replaced & (last_made > step))
    chosen = outlives & is_again & (step < case.summary.peak_step)
    held = evidence.at_peak(chosen)
    if not case.is_worth(held):
        return
    starts = np.where(np.isfinite(end), end, len(evidence.allocated)).astype("i8")
    saved = case.saved(np.where(outlives & is_again, blocks["bytes"], 0), starts, blocks["free_event"].to_numpy())
    at_peak = chosen & blocks["at_peak"].to_numpy(bool)
    num = len(np.unique(step[at_peak]))
    yield Fault(
        f"{format_bytes(held)} at the peak of step {case.summary.peak_step} come from the forward of "
        f"{'the step before' if num == 1 else counted(num, 'earlier step')}",
        "detach what is kept, and delete outputs at the end of the step",
        evidence.main_line(chosen),
        gives_bytes=(saved, saved),
    )


@rule("FD110", "a communication buffer larger than the model", "blocks", "calls", "stacks")
def large_bucket(case: Case) -> Iterator[Fault]:
    """A buffer for communication takes more than all parameters, whole and in fp32, would.

    Buckets have fixed sizes (`reduce_bucket_size` and `allgather_bucket_size` of DeepSpeed are 5e8 elements), whatever
    the model's is.

    The rule sees one block at the peak, for communication or with gradients in views of it, of more than twice the
    bytes of the parameters, of a job that does not gather parameters in forward.

    **Mend**: make the bucket as large as the model at most.

    Reported in DeepSpeed#1302.
    """
    evidence = case.evidence
    calls = evidence.last_calls
    is_sharded = (calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")).any()
    blocks = evidence.blocks
    # Views of DeepSpeed's buckets are gradients.
    of_views = evidence.category("gradient") & evidence.operation(r"aten\.empty\.")
    buffers = blocks[(evidence.category("communication") | of_views) & blocks["at_peak"].to_numpy(bool)]
    parameters = evidence.at_peak(evidence.category("parameter"))
    if is_sharded or not len(buffers) or not parameters:
        return
    row = buffers["bytes"].idxmax()
    size = int(buffers["bytes"].loc[row])
    if size > _BUCKET * parameters and case.is_worth(size - 2 * parameters):
        gone = np.zeros(len(blocks))
        gone[(blocks["bytes"] == size) & (blocks["operation"] == buffers["operation"].loc[row])] = size - parameters
        yield Fault(
            f"a buffer for communication takes {format_bytes(size)}, and all parameters {format_bytes(parameters)}",
            "a bucket no larger than the model (DeepSpeed: reduce_bucket_size, allgather_bucket_size)",
            case.line(int(buffers["stack"].loc[row])),
            gives_bytes=(0, case.saved(gone)),
        )


@rule("FD111", "no fp32 master weights", "blocks", "layers", "calls", "groups", "kernels", "launches", "work")
def no_master_weights(case: Case) -> Iterator[Fault]:
    """Weights, gradients and Adam's moments are all in 16 bits, so updates much smaller than a weight are rounded away.

    bf16 has eight bits of mantissa: adding less than 1/512 of a weight changes nothing. Mixed precision as usual keeps
    fp32 weights in addition: 16 bytes a parameter instead of 8.

    The rule divides the bytes of layers, or of their shards, by the elements of their products: two a weight, and four
    for what `torch.optim`'s Adam keeps.

    **Mend**: keep fp32 parameters and use autocast or `MixedPrecisionPolicy`, or an optimizer that rounds
    stochastically; then this rule may be ignored.

    Reported in accelerate#3979.
    """
    kernels = case.kernels
    layers = case.table("layers")
    if not len(kernels) or not case.in_phase(kernels, "optimizer").any():
        return
    optimizer = kernels.loc[case.in_phase(kernels, "optimizer"), "operation"].astype(str)
    if not optimizer.str.contains(r"_fused_adam|_foreach_addcdiv|addcdiv_").any():
        return
    forward = kernels[case.in_phase(kernels, "forward") & (kernels["kind"] == "product").to_numpy()]
    forward = forward[(forward["batch"] <= 1).to_numpy() & (forward["layer"] > 0).to_numpy()]
    weights = (forward["n"] * forward["k"]).groupby(forward["layer"]).agg(["min", "count"])
    elements = weights.loc[weights["count"] == 1, "min"].to_numpy()
    of_layer = layers.loc[weights.index[weights["count"] == 1]]
    held, state = (of_layer[f"peak_{name}_bytes"].to_numpy() for name in ("parameter", "optimizer_state"))
    calls = case.evidence.last_calls
    gathers = calls[calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")]
    # Of a layer that FSDP shards, the rank holds a share while it is not gathered.
    whole = held * max(map(case.evidence.group_size, gathers["group"]), default=1)
    is_half = (2 * elements <= whole) & (whole <= 2.1 * elements)
    keeps_two = (2 * held <= state) & (state <= 2.1 * held)
    if is_half.any() and keeps_two[is_half].all():
        parameters = case.evidence.at_peak(case.evidence.category("parameter"))
        yield Fault(
            f"weights ({format_bytes(parameters)}) and Adam's moments are in 16 bits: with gradients, 8 bytes a "
            "parameter, where fp32 master weights make 16; small updates are rounded away",
            "fp32 parameters with autocast or MixedPrecisionPolicy, or stochastic rounding",
            is_certain=False,
        )


@rule("FD112", "adapters that keep what full training does not", "blocks", "layers", "stacks")
def adapter_copies(case: Case) -> Iterator[Fault]:
    """The branches of adapters, such as LoRA's, save tensors for backward that training the layers whole would not.

    With a dropout, each adapter keeps the dropout's result and its mask, where layers that are trained whole keep their
    input, once for all layers that read it. An adapter in fp32 on a model in 16 bits keeps a cast of its input.

    The rule sees four or more layers whose weight has neither a gradient nor an optimizer's state, with smaller weights
    next to it that have; and a fiftieth of the peak in dropouts and casts to fp32 that these layers saved.

    **Mend**: no dropout in the adapters (`lora_dropout=0`); adapters in the model's dtype
    (`autocast_adapter_dtype=False`).

    Reported in peft#2196 (2,618 MiB where full training takes 1,311).
    """
    evidence = case.evidence
    adapted = _adapted_layers(evidence.layers)
    if len(adapted) < _FEWEST_ADAPTERS:
        return
    inside = owners(evidence.layers, adapted) >= 0
    ours = case.is_saved & inside[evidence.blocks["layer"].to_numpy()]
    chosen = ours & evidence.operation(r"native_dropout")
    kernels = case.kernels
    if len(kernels):
        products = kernels[(kernels["kind"] == "product").to_numpy() & inside[kernels["layer"].to_numpy()]]
        if {2, 4} <= set(products.loc[case.in_phase(products, "forward"), "a_bytes"]):
            chosen = chosen | (ours & evidence.operation(r"_to_copy"))
    held = evidence.at_peak(chosen)
    if case.is_worth(held):
        names = {base_name(str(name)) for name in evidence.blocks["operation"][chosen].unique()}
        kinds = [text for name, text in _KEPT_BY_ADAPTERS.items() if name in names]
        yield Fault(
            f"adapters of {len(adapted)} frozen layers keep {format_bytes(held)} at the peak in {' and '.join(kinds)}",
            "adapters without dropout, in the model's dtype",
            evidence.main_line(chosen),
            gives_bytes=(0, case.saved(np.where(chosen, evidence.blocks["bytes"], 0))),
        )


_KEPT_BY_ADAPTERS = {"native_dropout": "dropouts and their masks", "_to_copy": "casts to fp32"}


def _adapted_layers(layers: pd.DataFrame) -> list[int]:
    """The innermost layers that hold one frozen weight and smaller ones that are trained."""
    held, gradient, state = (
        layers[f"most_{name}_bytes"].to_numpy("f8") for name in ("parameter", "gradient", "optimizer_state")
    )
    trained = np.minimum(np.where(gradient > 0, gradient, state / 2), held)
    frozen = np.where(held - trained > held / 2, held - trained, 0)
    parents = layers["parent"].to_numpy()
    num_frozen = (frozen > 0).astype("i8")
    for layer in reversed(range(1, len(layers))):  # children come after their parents
        for column in (trained, frozen, num_frozen):
            column[parents[layer]] += column[layer] if parents[layer] != layer else 0
    adapted = set()
    for layer in np.flatnonzero((gradient > 0) | (state > 0)).tolist():
        while layer > 0 and not num_frozen[layer]:
            layer = int(parents[layer])
        if layer > 0 and num_frozen[layer] == 1 and trained[layer] < _ADAPTERS_SHARE * frozen[layer]:
            adapted.add(layer)
    return sorted(adapted)


#: Notes of snapshots that do not know when memory was reserved that was before their history.
_CUT_SNAPSHOTS = ("snapshot_starts_late", "snapshot_without_history")


@rule("FD114", "compiled checkpointing that keeps more than eager", "blocks", "layers", "stacks")
def recomputed_together(case: Case) -> Iterator[Fault]:
    """A compiled backward computes several checkpointed layers again before it uses the first of them.

    Eager backward recomputes a layer, and frees what it made before it recomputes the next. Inductor orders a whole
    graph, and where the layers run twice in it, it may begin with what both passes recompute.

    The rule sees a graph whose buffers at the peak are recomputed results of three or more repeated layers that each
    saved something in forward, as layers that are checkpointed one by one do.

    **Mend**: `torch._dynamo.graph_break()` between the passes, or compile each layer by itself (`layer.compile()`) and
    checkpoint it outside. `fakedist compare EAGER COMPILED` shows what eager keeps.

    Reported in pytorch#193193 (3.1 times the peak of eager).
    """
    evidence = case.evidence
    blocks = evidence.blocks
    unit = owners(evidence.layers, [layer for fold in stacks(evidence) for layer in fold.layers])
    of_block = unit[blocks["layer"].to_numpy()]
    again = blocks["recompute"].to_numpy(bool) & evidence.phase("backward") & (of_block >= 0)
    at_peak = again & blocks["at_peak"].to_numpy(bool)
    compiled = at_peak & evidence.operation("inductor::graph")
    units = [set(own) for _, own in pd.Series(of_block[compiled]).groupby(blocks["op"].to_numpy()[compiled])]
    most = max(units, key=len, default=set())
    ours = at_peak & np.isin(of_block, list(most))
    held = blocks["bytes"][ours].groupby(of_block[ours]).sum()
    is_one_by_one = len(most & set(of_block[case.is_saved])) >= _FEWEST_TOGETHER
    if is_one_by_one and case.is_worth(held.sum() - held.max()):
        gives = case.saved(np.where(again & (of_block != held.idxmax()), blocks["bytes"], 0))
        yield Fault(
            f"a compiled backward recomputes {len(held)} layers before it uses the first: their results hold "
            f"{format_bytes(int(held.sum()))} at the peak, those of one layer {format_bytes(int(held.max()))}",
            "graph_break() between two passes of the layers, or layer.compile() inside of the checkpoint",
            evidence.main_line(ours),
            gives_bytes=(0, gives),
        )


@rule("FD115", "fragmentation", "segments", "blocks", "events")
def fragmentation(case: Case) -> Iterator[Fault]:
    """The allocator reserved memory that it cannot use: free blocks have the wrong sizes, or are another stream's.

    Steps whose sizes differ leave blocks of sizes that the next steps do not ask for. A block that was allocated on one
    stream is not given to another.

    The rule sees 15 % or more of what is reserved outside of CUDA graphs' pools at the reserved peak, and more than
    200 MiB, that was in no block at any one time. If half of it is in segments of other streams than the one that holds
    the most, the streams are the reason. It says nothing of a snapshot that does not know when its segments were made.

    **Mend**: `PYTORCH_ALLOC_CONF=expandable_segments:True`, which maps pages where they are needed; or pad to a few
    sizes, the largest first. Free blocks of another stream need one stream to allocate on.
    """
    evidence = case.evidence
    segments = case.table("segments")
    segments = segments[(segments["moment"] == "peak_reserved").to_numpy()]
    is_private = (segments["private_pool"] != "").to_numpy()
    # Graphs' pools have no cure but FD107's.
    reserved = evidence.reserved_peak - int(segments.loc[is_private, "bytes"].sum())
    unused = reserved - evidence.kept_without(_in_segments(case, segments[is_private]))
    is_cut = any(note.code in _CUT_SNAPSHOTS for note in case.summary.notes)
    is_earlier = is_cut and int(case.table("events")["reserved_bytes"].iloc[0]) == evidence.reserved_peak
    if evidence.grows or is_earlier or unused < max(_UNUSED_SHARE * reserved, _LEAST_UNUSED_BYTES):
        return
    by_stream = segments[~is_private].groupby("stream")[["allocated_bytes", "free_bytes"]].sum()
    of_others = min(int(by_stream["free_bytes"].drop(by_stream["allocated_bytes"].idxmax()).sum()), unused)
    is_of_streams = 2 * of_others >= unused
    yield Fault(
        f"up to {format_bytes(unused)} of the {format_bytes(reserved)} reserved"
        f"{' outside of private pools' if is_private.any() else ''} held no block"
        + (f"; {format_bytes(of_others)} are free for other streams alone" if is_of_streams else ""),
        "allocate on one stream" if is_of_streams else "PYTORCH_ALLOC_CONF=expandable_segments:True",
        costs_bytes=unused,
        advice="" if is_of_streams else "expandable-segments",
    )


def _in_segments(case: Case, segments: pd.DataFrame) -> Array:
    """Mask of the blocks in some segments, from when they were made."""
    blocks, events = case.evidence.blocks, case.table("events")
    made = events[matches(events["action"], lambda name: name == "segment_alloc")]
    since = pd.Series(made.index, made["address"].to_numpy()).groupby(level=0).max()
    address, event = blocks["address"].to_numpy(), blocks["alloc_event"].to_numpy()
    inside = np.zeros(len(blocks), bool)
    for start, size in zip(segments["address"], segments["bytes"], strict=True):
        inside |= (start <= address) & (address < start + size) & (event >= since.get(start, 0))
    return inside


@rule("FD116", "retries of the allocator in a steady step")
def retries(case: Case) -> Iterator[Fault]:
    """In the timed step the allocator runs out of memory, gives back what it caches, and asks again.

    The rule sees requests of the timed step that were granted at the second try. Each retry waits for the GPU and calls
    cudaFree and cudaMalloc; in a steady step this happens in every step.

    **Mend**: less memory (the advice), or expandable segments if memory is fragmented.
    """
    allocator = case.summary.kernels.allocator if case.summary.kernels else None
    if allocator is None or not allocator.num_retries:
        return
    yield Fault(
        f"the timed step has {counted(allocator.num_retries, 'request')} that did not fit at "
        f"first: the allocator gives back {format_bytes(allocator.given_back_bytes)} and asks again",
        "lower the peak, or PYTORCH_ALLOC_CONF=expandable_segments:True",
        gives_us=(allocator.low_us, allocator.high_us + allocator.wait_us),
        costs_us=allocator.time_us,
    )


@rule("FD117", "dropout or casts that double activations", "blocks", "layers", "stacks")
def doubled_activations(case: Case) -> Iterator[Fault]:
    """A dropout or a cast keeps its result for backward, in addition to what it was made from.

    A dropout keeps a mask of a byte an element in addition to its output. Under autocast, a tensor that was computed in
    fp32 (norms, losses, a residual stream in fp32) is cast for a product, and both are kept.

    The rule sees masks of `native_dropout`, and a twentieth of the peak or more in casts whose sources, twice as large,
    are kept too.

    **Mend**: pretraining needs no dropout (p=0), and `torch.compile` keeps no mask; keep the residual stream and norms
    in bf16.
    """
    evidence = case.evidence
    blocks = evidence.blocks
    sizes, op = blocks["bytes"].to_numpy(), blocks["op"].to_numpy()
    at_peak = blocks["at_peak"].to_numpy(bool)
    by_adapters = owners(evidence.layers, _adapted_layers(evidence.layers)) >= 0  # FD112 has theirs
    in_adapter = by_adapters[blocks["layer"].to_numpy()]
    dropped = np.flatnonzero(~in_adapter & evidence.operation(r"native_dropout"))  # the result need not be saved
    whole = pd.Series(sizes[dropped]).groupby(op[dropped]).transform("max").to_numpy()
    is_mask = np.zeros(len(blocks), bool)
    is_mask[dropped[sizes[dropped] < whole]] = True
    is_mask &= case.is_saved
    casts = case.is_saved & ~in_adapter & evidence.operation(r"_to_copy") & ~_as_large_as_half_a_weight(case)
    sources = np.isin(sizes, 2 * sizes[casts & at_peak]) & case.is_saved & at_peak & ~casts
    if sizes[sources].sum() < sizes[casts & at_peak].sum():  # of most casts, the source is not kept
        casts = np.zeros(len(blocks), bool)
    for chosen, what, change, is_exact in (
        (is_mask, "masks of dropout", "p=0, or torch.compile, which keeps no mask", True),
        (casts, "casts of what is kept, too,", "norms and the residual stream in the products' dtype", False),
    ):
        held = evidence.at_peak(chosen)
        if case.is_worth(held) and (is_exact or held >= _CASTS_SHARE * case.peak):
            gives = case.saved(np.where(chosen, sizes, 0))
            yield Fault(
                f"{what} hold {format_bytes(held)} at the peak",
                change,
                evidence.main_line(chosen),
                gives_bytes=(gives if is_exact else 0, gives),
            )


def _as_large_as_half_a_weight(case: Case) -> Array:
    """Mask of the blocks as large as half of a parameter: casts of weights that autocast caches."""
    blocks = case.evidence.blocks
    return np.asarray(np.isin(2 * blocks["bytes"], blocks.loc[case.evidence.category("parameter"), "bytes"]))
