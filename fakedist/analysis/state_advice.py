"""Advice on parameters, gradients and optimizer state: shard them over the ranks that hold the same, or free them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import (
    BLOCK_BYTES,
    Change,
    Evidence,
    Passes,
    Price,
    ReplicaGroup,
    Saving,
    owners,
    passes_of,
    stacks,
)
from fakedist.analysis.parallel_advice import Megatron
from fakedist.analysis.recording import Array
from fakedist.units import MIB, format_bytes

#: Layers whose parameters and gradients FSDP has whole at once: gathered ahead, at work, and in buffers still in use.
_WHOLE_LAYERS = 3
#: Layers that FSDP2 has whole in backward: one at work, and one gathered ahead.
_GATHERED_AGAIN = 2
_COMMUNICATION = "communication"
_MEGATRON_FSDP = r"/megatron_fsdp/"
#: Elements that Megatron-FSDP (0.6.1) gathers ahead, and whose gradients it reduces at once, unless units are larger.
_GATHERED_AHEAD, _REDUCED_AT_ONCE = 500_000_000, 1_000_000_000
_BYTES_OF = {"bfloat16": 2, "float16": 2, "float32": 4}
#: Ranks from which on the size of a buffer says whether it is whole: halves of fp32 are as large as whole bf16.
_FEWEST = 3


def shard_replicas(evidence: Evidence) -> Iterator[Change]:
    """State that every rank of a group duplicates, because the group all-reduces its gradients."""
    group = evidence.replicas
    megatron = Megatron.of(evidence)
    if evidence.files.astype(str).str.contains(_MEGATRON_FSDP).any():
        yield from _shard_more(evidence, megatron)
        if group is not None and _is_sharded(evidence, group):
            yield _shard_over_replicas(evidence, group)
        return
    if group is None:
        return
    calls = evidence.last_calls
    is_reduction = calls["operation"].str.startswith("all_reduce") & (calls["group"] == group.number)
    reduced_us = evidence.calls_us(calls.loc[is_reduction, "sequence"])
    if _is_sharded(evidence, group):
        yield _shard_over_replicas(evidence, group)
        return
    yield from _shard_optimizer(evidence, group, megatron, reduced_us)
    if megatron is None:  # Megatron's own FSDP asks for more than a flag
        yield from _fully_shard(evidence, group, reduced_us)


def _is_sharded(evidence: Evidence, replicas: ReplicaGroup) -> bool:
    """Whether FSDP shards each replica: another group gathers parameters in forward."""
    calls = evidence.last_calls
    gathers = calls[calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")]
    return bool(set(gathers["group"]) - evidence.splits_tensors - {replicas.number})


def _shard_over_replicas(evidence: Evidence, group: ReplicaGroup) -> Change:
    """FSDP over all ranks where it shards each of several replicas (HSDP).

    The time is not known: gathers of whole layers then cross the links between replicas.
    """
    bytes_ = evidence.blocks["bytes"].to_numpy()
    parameter, gradient, state = (evidence.category(name) for name in ("parameter", "gradient", "optimizer_state"))
    is_gathered = evidence.phase("forward", "backward")
    is_shard = (parameter & ~is_gathered) | (gradient & _outlives_a_backward(evidence)) | state
    gone = np.where(is_shard, bytes_ * (1 - 1 / group.size), 0)
    return Change(
        "shard-parameters",
        f"shard over {group.label}, too, instead of replicas (FSDP without HSDP)",
        f"all {group.size:,} ranks of {group.label} hold the same shards of parameters, gradients and optimizer state, "
        f"{format_bytes(evidence.at_peak(is_shard))} at the peak; with one dimension of the mesh for both, each keeps "
        f"1/{group.size:,} of it, and gathers cross the links between replicas",
        Saving(np.where(_works_on_state(evidence), bytes_ * (1 - 1 / group.size), gone)),
        Saving(np.where(is_shard, _surely_gone(bytes_, 1 - 1 / group.size), 0)),
        subjects=frozenset({"shard"}),
    )


def _works_on_state(evidence: Evidence) -> Array:
    """Temporaries of the optimizer. At most, all of them are for the parameters whose state goes."""
    return evidence.phase("optimizer") & evidence.category("temporary")


def _surely_gone(bytes_: Array, share: float) -> Array:
    """The least that goes with a share of each block: the caching allocator may give the rest up to 1 MiB more.

    Blocks above 1 MiB are cut from segments of 20 MiB, and leave their last MiB to the last one; blocks of 10 MiB and
    more have segments of their own, in multiples of 2 MiB. Others are rounded up.
    """
    left = bytes_ * (1 - share)
    rounding = np.where(left < 10 * MIB, left / 19, MIB)
    return np.maximum(bytes_ - left - np.where(left > MIB, rounding, BLOCK_BYTES), 0)


def _shard_optimizer(
    evidence: Evidence, group: ReplicaGroup, megatron: Megatron | None, reduced_us: float
) -> Iterator[Change]:
    state = evidence.category("optimizer_state")
    held = evidence.at_peak(state)
    parameters = evidence.at_peak(evidence.category("parameter"))
    if not held or held < parameters / 2:  # less than half: already sharded
        return
    share = 1 - 1 / group.size
    gone = np.where(state, evidence.blocks["bytes"] * share, 0)
    most = np.where(_works_on_state(evidence), evidence.blocks["bytes"] * share, gone)
    if megatron is not None:
        how = megatron.optimizer_flags()
        least = Saving(gone)
        title = f"shard the optimizer over {group.label}: {how}"
    else:
        how = "ZeroRedundancyOptimizer"
        title = f"shard the optimizer over {group.label} (ZeRO-1)"
        least = Saving(np.where(_largest_states(evidence, state), 0, gone))
    yield Change(
        "shard-optimizer",
        title,
        f"all {group.size:,} ranks of {group.label} hold the same optimizer state, {format_bytes(held)} at the peak; "
        f"with {how} each keeps 1/{group.size:,} of it",
        Saving(most),
        least,
        line=evidence.main_line(state),
        subjects=frozenset({"shard"}),
        # ZeroRedundancyOptimizer broadcasts each parameter by itself, which takes longer than one gather of all.
        price=None if megatron is None else _gather_price(evidence, reduced_us / 2),
        has_other_blocks=megatron is not None,  # it pads its buffers, and has parameters in them too
    )


def _largest_states(evidence: Evidence, state: Array) -> Array:
    """The states of the largest parameter: ZeroRedundancyOptimizer gives away whole parameters, not parts of them."""
    parameters = evidence.category("parameter") & evidence.blocks["at_peak"].to_numpy()
    count = round(int(state.sum()) / max(int(parameters.sum()), 1))
    sizes = np.where(state, evidence.blocks["bytes"].to_numpy(), 0)
    chosen = np.zeros(len(sizes), bool)
    chosen[np.argsort(-sizes, kind="stable")[: max(count, 1)]] = True
    return chosen & state


def _gather_price(evidence: Evidence, gathers_us: float, calls: str = "all-gathers") -> Price | None:
    """Gathers of parameters, each half as long as the all-reduce of as many bytes, hidden or not."""
    return None if evidence.kernels is None else Price(0.0, gathers_us, calls)


def _fully_shard(evidence: Evidence, group: ReplicaGroup, reduced_us: float) -> Iterator[Change]:
    """FSDP2 in DDP's place: with parameters whole until backward (ZeRO-2), or layer by layer (ZeRO-3).

    Exact are the parts of a group's size. Which layers are whole at once is known only by bounds: none, or three and
    all that is outside of repeated layers.
    """
    blocks = evidence.blocks
    share = 1 - 1 / group.size
    bytes_, layer = blocks["bytes"].to_numpy(), blocks["layer"].to_numpy()
    parameter, gradient, state = (evidence.category(name) for name in ("parameter", "gradient", "optimizer_state"))
    is_bucket = evidence.category(_COMMUNICATION) & _outlives_a_backward(evidence)
    is_whole = np.ones(len(evidence.layers), bool)  # layers of which parameters may be whole
    for fold in stacks(evidence):
        owner = owners(evidence.layers, fold.layers)
        is_whole[owner >= _WHOLE_LAYERS] = False
    of_whole = is_whole[layer]
    held = evidence.at_peak(parameter | gradient | state)
    who = f"all {group.size:,} ranks of {group.label} hold the same parameters, gradients and optimizer state"
    for stage in (3, 2):
        sharded = (parameter | gradient | state) if stage == 3 else (gradient | state)
        most = np.where(sharded | _works_on_state(evidence), bytes_ * share, 0) + np.where(is_bucket, bytes_, 0)
        least = np.where((parameter | gradient) & of_whole, 0, np.where(sharded, _surely_gone(bytes_, share), 0))
        least = least + np.where(is_bucket, bytes_, 0)
        if stage == 2:  # this rank's shards, in addition to whole parameters
            most = np.where(parameter, -bytes_ * (1 - share), most)
            least = np.where(parameter, -bytes_ * (1 - share) - BLOCK_BYTES, least)
        how = "fully_shard each layer and the model" + " with reshard_after_forward=False" * (stage == 2)
        kept = "gathers one layer at a time" if stage == 3 else "keeps whole parameters from forward to backward"
        yield Change(
            "shard-parameters" if stage == 3 else "shard-gradients",
            f"{how}, over {group.label}, instead of replicas (ZeRO-{stage})",
            f"{who}, {format_bytes(held)} at the peak; with FSDP2 each keeps 1/{group.size:,}, and {kept}",
            Saving(most),
            Saving(least),
            subjects=frozenset({"shard"}),
            # At most, none of the gathers and reduce-scatters is hidden; each is half of an all-reduce.
            price=_gather_price(evidence, reduced_us / 2 * stage, "all-gathers and reduce-scatters"),
        )


def _shard_more(evidence: Evidence, megatron: Megatron | None) -> Iterator[Change]:
    """Gradients and parameters that Megatron-FSDP's buffers hold whole, with optimizer states sharded already.

    Buffers of the size that a gather results in are whole. Which units are whole at once is known by bounds: none, or
    what is outside of repeated layers, three units, and those gathered ahead. Buckets of gradients alike.
    """
    calls = evidence.last_calls
    bytes_ = evidence.blocks["bytes"].to_numpy()
    gathers = calls[calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")]
    scatters = calls[calls["operation"].str.startswith("reduce_scatter") & (calls["phase"] == "backward")]
    sizes = {evidence.group_size(int(group)) for group in (*gathers["group"], *scatters["group"])}
    types = {_BYTES_OF.get(str(dtype), 0) for dtype in gathers["dtype"]}
    if len(sizes) != 1 or len(types) != 1 or min(sizes) < _FEWEST or not min(types):
        return
    (size,), (item_bytes,) = sizes, types
    in_buffers = _made_by_megatron_fsdp(evidence) & evidence.phase("init") & evidence.blocks["at_peak"].to_numpy()
    is_gathered = np.isin(evidence.blocks["requested_bytes"], gathers["bytes_out"])
    weights, gradients = (in_buffers & evidence.category(name) for name in ("parameter", "gradient"))
    weights &= is_gathered
    whole, held = int(bytes_[weights].sum()), int(bytes_[gradients].sum())
    passes = round(int(gathers["bytes_out"].sum()) / max(whole, 1))
    if not whole or abs(passes * whole - int(gathers["bytes_out"].sum())) > whole / 10:
        return
    share = 1 - 1 / size
    # Sharded gradients have at most 4 bytes for each element of a shard, whole ones at least 2 for every element.
    gradients &= held >= 1.9 * whole / item_bytes
    micro_batches = int(
        ((evidence.spans["step"] == calls["step"].max()) & evidence.spans["phase"].isin(["backward"])).sum()
    )
    gathers_us = evidence.calls_us(gathers["sequence"]) / passes * 2 * micro_batches
    scatters_us = evidence.calls_us(scatters["sequence"]) * micro_batches
    in_flight = _buckets_in_flight(evidence, scatters)
    at_work = _units_at_work(evidence, weights, item_bytes)
    names = [("optim_grads", gradients, "gradients")] if gradients.any() else []
    names.append(("optim_grads_params", gradients | weights, "gradients and parameters" if names else "parameters"))
    for strategy, sharded, what in names:
        flag = f'zero_dp_strategy="{strategy}"' if megatron is None else f"--data-parallel-sharding-strategy {strategy}"
        has_weights = strategy == "optim_grads_params"
        stays = in_flight * bool(gradients.any()) + at_work * has_weights
        least = np.where(sharded, _surely_gone(bytes_, share), 0.0)
        least -= np.where(sharded, bytes_ * (min(stays / max(int(bytes_[sharded].sum()), 1), 1.0)), 0)
        yield Change(
            "shard-parameters" if has_weights else "shard-gradients",
            f"shard the {what} over the {size:,} ranks, too: {flag} (ZeRO-{3 if has_weights else 2})",
            f"each of the {size:,} ranks holds all {what} in Megatron-FSDP's buffers, "
            f"{format_bytes(evidence.at_peak(sharded))}; sharded, each keeps 1/{size:,}, and whole units or buckets at "
            f"work, at most {format_bytes(stays)}",
            Saving(np.where(sharded, bytes_ * share, 0)),
            Saving(least),
            line=evidence.main_line(sharded),
            subjects=frozenset({"shard"}),
            price=_gather_price(evidence, gathers_us * has_weights + scatters_us * bool(gradients.any())),
        )


def _made_by_megatron_fsdp(evidence: Evidence) -> Array:
    """Blocks whose line is in Megatron-FSDP."""
    is_line = np.array([re.search(_MEGATRON_FSDP, line) is not None for line in evidence.lines])
    return np.asarray(is_line[evidence.blocks["stack"].to_numpy()])


def _buckets_in_flight(evidence: Evidence, scatters: pd.DataFrame) -> int:
    """The most bytes of gradients' buckets that sharded gradients would need in addition."""
    largest, step = int(scatters["bytes_in"].max()), int(scatters["step"].max())
    buckets = _made_by_megatron_fsdp(evidence) & evidence.phase("backward") & evidence.category(_COMMUNICATION)
    of_step = buckets & (evidence.blocks["step"].to_numpy() == min(step, int(evidence.blocks["step"].max())))
    if evidence.blocks.loc[of_step, "bytes"].sum() >= 0.9 * scatters["bytes_in"].sum():
        return largest  # they are there, and one may begin sooner
    item_bytes = max(_BYTES_OF.get(str(dtype), 4) for dtype in scatters["dtype"])
    return min(int(scatters["bytes_in"].sum()), _REDUCED_AT_ONCE * item_bytes + 2 * largest)


def _units_at_work(evidence: Evidence, weights: Array, item_bytes: int) -> int:
    """The most bytes of parameters that are whole at once with all of them sharded."""
    held = evidence.blocks.loc[weights, ["layer", "bytes"]]
    parts = evidence.shares[evidence.shares["block"].isin(held.index)]
    held = pd.concat([held.drop(parts["block"].unique()), parts[["layer", "bytes"]]])
    bytes_, layer = held["bytes"].to_numpy(), held["layer"].to_numpy()
    outside = np.ones(len(bytes_), bool)
    unit = 0
    for fold in stacks(evidence):
        owner = owners(evidence.layers, fold.layers)[layer]
        outside &= owner < 0
        unit = max(unit, int(np.bincount(owner[owner >= 0], bytes_[owner >= 0]).max(initial=0)))
    ahead = max(_GATHERED_AHEAD * item_bytes, unit)
    return min(int(bytes_[outside].sum()) + _WHOLE_LAYERS * unit + ahead, int(bytes_.sum()))


def _outlives_a_backward(evidence: Evidence) -> Array:
    """Blocks that are older than a backward, and alive after it, as DDP's buckets are."""
    made, freed = (evidence.blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    ends = evidence.spans["first_event"].shift(-1, fill_value=len(evidence.allocated))
    is_backward = (evidence.spans["phase"].astype(str) == "backward").to_numpy()
    begin, end = evidence.spans["first_event"].to_numpy()[is_backward], ends.to_numpy()[is_backward]
    following = np.searchsorted(begin, made, "right")
    return np.asarray(np.append(end, np.iinfo("i8").max)[following] <= freed)


def reshard(evidence: Evidence) -> Iterator[Change]:
    """Parameters of FSDP2 that stay whole from forward to backward."""
    blocks = evidence.blocks
    whole = evidence.category("parameter") & evidence.phase("forward") & (blocks["step"].to_numpy() > 0)
    for fold in stacks(evidence):
        owner = owners(evidence.layers, fold.layers)
        passes = passes_of(evidence, owner)
        mine = whole & (owner[blocks["layer"].to_numpy()] >= 0)
        if passes is None or not mine.any():
            continue
        found = np.flatnonzero(mine)
        most, least, kept = _resharded(evidence, passes, found, owner)
        calls = evidence.last_calls
        is_gather = calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")
        gathers_us = evidence.calls_us(calls.loc[is_gather & (owner[calls["layer"]] >= 0), "sequence"])
        held = format_bytes(evidence.at_peak(kept))
        yield Change(
            "reshard",
            f"reshard the parameters of {fold.name} after forward (ZeRO-3)",
            f"whole parameters of these layers, {held} at the peak, stay from forward to backward; with "
            "fully_shard(layer, reshard_after_forward=True), they are freed and gathered again",
            most,
            least,
            subjects=frozenset({f"reshard {fold.name}"}),
            # At most, the host is the limit, and takes as long for gathers as for all of these layers' forward.
            price=_gather_price(evidence, max(gathers_us, evidence.host_us("forward", owner >= 0))),
        )


def _resharded(evidence: Evidence, passes: Passes, found: Array, owner: Array) -> tuple[Saving, Saving, Array]:
    """The most and least saving, and which blocks are whole from their layer's forward to its backward.

    At least, a layer's parameters leave once the next layer's forward has ended, and are back two layers before its
    backward: the next layer's are gathered ahead, into a buffer from which they are copied. The last layer's are
    gathered as soon as backward begins. Each block that is gathered again may get up to 1 MiB more, as the caching
    allocator leaves smaller rests whole.
    """
    blocks = evidence.blocks
    num_events = len(evidence.allocated)
    made, freed, layer = (blocks[name].to_numpy() for name in ("alloc_event", "free_event", "layer"))
    gone = np.zeros(len(blocks))
    kept = np.zeros(len(blocks), bool)
    starts, ends = made.copy(), freed.copy()
    late, early = made.copy(), freed.copy()
    is_backward = evidence.spans["phase"].astype(str) == "backward"
    begins = np.append(evidence.spans.loc[is_backward, "first_event"].to_numpy(), num_events)
    by_owner = {number: np.flatnonzero(passes.owner == number) for number in np.unique(passes.owner).tolist()}
    for block in found.tolist():
        own = by_owner.get(int(owner[layer[block]]), np.zeros(0, int))
        row = own[(passes.end_event[own] > made[block]) & (passes.back_event[own] <= freed[block])]
        if not len(row):
            continue
        first, last = int(row[0]), int(row[-1])  # of the micro-batches between which it stays
        after = passes.next
        kept[block], gone[block] = True, blocks["bytes"].to_numpy()[block]
        starts[block], ends[block] = passes.end_event[first] + 1, passes.back_event[last] - 1
        late[block] = passes.end_event[after[first]] + 1
        backward = begins[np.searchsorted(begins, passes.end_event[last])]
        early[block] = min(backward if after[last] == last else passes.back_event[after[after[last]]], num_events) - 1
    is_rounded = (gone > MIB) & np.isin(owner[layer], np.unique(passes.owner)[:_GATHERED_AGAIN])
    return Saving(gone, starts, ends), Saving(np.where(is_rounded, gone - MIB, gone), late, early), kept


def unfused_temporaries(evidence: Evidence) -> Array:
    """Mask of the blocks that ``foreach`` operations of an optimizer make, which a fused one does not."""
    return evidence.operation("_foreach_") & evidence.phase("optimizer") & evidence.category("temporary")


def fuse_optimizer(evidence: Evidence) -> Iterator[Change]:
    """Temporaries for all parameters at once, which an unfused optimizer allocates.

    At least, a fused one has a counter of steps on the GPU for each parameter: an unfused one has it on the host.
    """
    chosen = unfused_temporaries(evidence)
    if chosen.any():
        held = format_bytes(evidence.at_peak(chosen))
        gone = np.where(chosen, evidence.blocks["bytes"], 0)
        yield Change(
            "fuse-optimizer",
            "use the fused optimizer: fused=True",
            f"the optimizer step holds {held} of temporaries at the peak; fused=True needs none, foreach=False those "
            "of one parameter at a time",
            Saving(gone),
            Saving(np.where(evidence.category("parameter"), -BLOCK_BYTES, gone)),
            line=evidence.main_line(chosen),
            price=Price(0.0, 0.0, ""),
        )


def drop_gradients(evidence: Evidence) -> Iterator[Change]:
    """Gradients of the previous step that are kept until backward adds to them.

    At least, new ones take as much from the first block on that their layer makes in backward. At most, a new one
    takes the place of the one that is added now, and freed.
    """
    blocks = evidence.blocks
    spans = evidence.spans.astype({"phase": str}).drop_duplicates(["step", "phase"])
    made, freed, layer, bytes_ = (blocks[name].to_numpy() for name in ("alloc_event", "free_event", "layer", "bytes"))
    gradient = np.flatnonzero(evidence.category("gradient"))
    forwards = np.append(spans.loc[spans["phase"] == "forward", "first_event"].to_numpy(), len(evidence.allocated))
    gradient = gradient[freed[gradient] > forwards[np.searchsorted(forwards[:-1], made[gradient], side="right")]]
    if not len(gradient):
        return
    in_backward = evidence.phase("backward")
    gone = np.zeros(len(blocks))
    kept = 0
    starts, least, most = made.copy(), freed.copy(), freed.copy()
    for step in sorted(set(spans["step"]) - {0, 1}):
        of_step = spans[spans["step"] == step]
        begins = [of_step.loc[of_step["phase"] == phase, "first_event"] for phase in ("forward", "backward")]
        if not all(map(len, begins)):
            continue
        forward, backward = (int(events.iloc[0]) for events in begins)
        idle = gradient[(made[gradient] < forward) & (freed[gradient] > backward)]
        gone[idle], starts[idle] = bytes_[idle], forward
        kept = max(kept, int(bytes_[idle].sum()))
        later = np.flatnonzero(in_backward & (blocks["step"].to_numpy() == step))
        for block in idle.tolist():
            own = later[layer[later] == layer[block]]
            added = own[bytes_[own] == bytes_[block]]
            least[block] = min(made[own].min(initial=freed[block]) if len(own) else backward, freed[block])
            most[block] = min(max(freed[added].max(initial=0), least[block]), freed[block])
    if kept:
        yield Change(
            "drop-gradients",
            "free the gradients after the step: zero_grad(set_to_none=True)",
            f"gradients of the previous step, {format_bytes(kept)}, stay allocated during forward; "
            "zero_grad(set_to_none=True) after the optimizer step frees them",
            Saving(gone, starts, most),
            Saving(gone, starts, least),
            price=Price(0.0, 0.0, ""),
        )
