"""Rules of distribution: what the ranks of a job hold or do more than once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pandas as pd

from fakedist.analysis.call_order import match_calls
from fakedist.findings.case import Case
from fakedist.findings.registry import Fault, rule
from fakedist.units import format_bytes, format_rank_list, format_us, parse_rank_list

_REPLICAS_SHARE = 0.25
_UNEVEN = 0.05
_MOST_CALLS = 3
#: How a rank ends that expects something else than what another rank sent (world.tapes).
_SENT_OTHERS = re.compile(r"WorldError: (.+): this rank expects (.+), the tape .+ has (.+)")
_SAME_CALLS = "the same calls on all ranks of a group (fakedist match names each)"


@rule("FD113", "axes of a mesh swapped", "calls", "groups", "blocks", "spans")
def swapped_axes(case: Case) -> Iterator[Fault]:
    """A model is replicated over the axis that was meant to shard it, and sharded over that of the replicas.

    `fully_shard` takes the first axis of a mesh of two for replicas and the second for shards, whatever their names
    are; other wrappers take them by position, too.

    The rule sees a group with a name of shards that all-reduces gradients and gathers nothing, next to one with a name
    of replicas that gathers parameters. Without such names it may be on purpose that shards are in several nodes, and
    all replicas in one, where the gathers take the network and the all-reduces NVLink.

    **Mend**: `init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))`, and hand it over in
    that order.

    Reported in FastVideo#612.
    """
    evidence = case.evidence
    calls = case.evidence.last_calls
    gathers = calls[calls["operation"].str.startswith("all_gather") & (calls["phase"] == "forward")]
    scatters = calls[calls["operation"].str.startswith("reduce_scatter") & (calls["phase"] == "backward")]
    reduces = calls[calls["operation"].str.startswith("all_reduce") & (calls["phase"] == "backward")]
    sharding = set(gathers["group"]) & set(scatters["group"])
    for number in sorted(set(reduces["group"]) - set(gathers["group"])):
        for shards in sorted(sharding):
            if min(map(evidence.group_size, (number, shards))) < 2:
                continue
            are_named = _words(case, number) & _SHARDS and _words(case, shards) & _REPLICAS
            inner, outer = (_nodes(case, group) for group in (number, shards))
            is_inside_out = case.gpus_per_node > 1 and len(set(inner)) == 1 and len(set(outer)) == len(outer)
            if not are_named and not is_inside_out:
                continue
            yield Fault(
                f"parameters are sharded over the {evidence.group_size(shards):,} ranks of "
                f"{evidence.group_label(shards)}, and replicated over the {evidence.group_size(number):,} of "
                f"{evidence.group_label(number)}"
                + ("" if are_named else ": shards are in several nodes, replicas in one"),
                "a mesh of (replicas, shards), in this order, with the shards in a node",
                is_certain=bool(are_named),
            )
            return


_SHARDS, _REPLICAS = {"shard", "shards", "sharded", "sharding", "fsdp"}, {"replicate", "replica", "replicas", "ddp"}


def _words(case: Case, group: int) -> set[str]:
    return set(re.split(r"[^a-z]+", case.evidence.group_label(group).lower()))


def _nodes(case: Case, group: int) -> list[int]:
    ranks = parse_rank_list(str(case.evidence.groups["ranks"].iloc[group]))
    return [rank // max(case.gpus_per_node, 1) for rank in ranks]


@rule("FD301", "calls of ranks that do not match", "calls", "call_terms", "groups", "steps", of_job=True)
def calls_that_differ(cases: Mapping[int, Case]) -> Iterator[Fault]:
    """Ranks of a group make different calls, so the job hangs, or corrupts what it exchanges.

    The rule plays the calls of the ranks that ran against each other, as `fakedist match` does, which also names what
    each of them waits for ([match.md](match.md)). A rank without a run is taken to make the matching calls. If a rank's
    script failed, or has read values that no kernel computed, calls may differ for that reason, and the rule says
    nothing, or is not sure. A rank that ended because another had sent it something else, as where models that DDP
    wraps differ, is a fault by itself.

    **Mend**: make the same calls, in the same order and with the same sizes, on all ranks of a group; collectives do
    not belong behind conditions that only some ranks meet.
    """
    is_certain = not any(case.summary.invented_values for case in cases.values())
    for rank, case in cases.items():
        if ended := _SENT_OTHERS.fullmatch(case.summary.exit.message):
            call, wanted, sent = ended.groups()
            text = f"rank {rank:,} expects {wanted} of the {call}, and {sent} was sent"
            yield Fault(text, _SAME_CALLS, is_certain=is_certain)
            return
    programs = [case.calls() for case in cases.values() if case.calls is not None]
    if len(programs) < 2 or not all(case.summary.exit.ended_well for case in cases.values()):
        return
    matched = match_calls(programs)
    different = matched.difference
    at_fault = different.calls if different is not None else [wait.made for wait in matched.waiting]
    if not at_fault:
        return
    first = at_fault[0]
    terms, calls = (cases[first.rank].table(name) for name in ("call_terms", "calls"))
    lines = str(terms["lines"].iloc[int((calls["sequence"] == first.call.sequence).to_numpy().argmax())]).splitlines()
    ranks = format_rank_list(sorted({made.rank for made in at_fault}))
    operations = " and ".join(dict.fromkeys(made.call.operation for made in at_fault[:_MOST_CALLS]))
    yield Fault(
        f"calls of ranks {ranks} ({operations}) differ in {different.what}"
        if different is not None
        else f"ranks {ranks} wait forever in {operations}, which others of the group do not make",
        _SAME_CALLS,
        lines[0] if lines else "",
        is_certain=is_certain,
    )


@rule("FD302", "work that only some ranks do", "kernels", "calls", of_job=True)
def uneven_work(cases: Mapping[int, Case]) -> Iterator[Fault]:
    """Ranks that make the same calls compute for different times, so the others wait in the next collective.

    Rank 0 evaluates, logs norms or draws samples within the step, or a dataset gives some ranks longer sequences.

    The rule sees ranks that make the same collectives, in groups of the same sizes, in the timed step. The kernels of
    one of them take a twentieth of the step longer than those of another.

    **Mend**: share the work, do it on all ranks, or do it outside of the step.

    Reported in VeOmni#164.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, case in cases.items():
        if case.time is not None and len(case.kernels):
            calls = case.evidence.last_calls
            sizes = [case.evidence.group_size(group) for group in calls["group"]]
            alike.setdefault((*calls["operation"], *sizes, *calls["phase"]), []).append(rank)
    for ranks in alike.values():
        taken = {rank: _by_line(cases[rank]) for rank in ranks}
        slow, fast = (choose(ranks, key=lambda rank: taken[rank].sum()) for choose in (max, min))
        more_us = float(taken[slow].sum() - taken[fast].sum())
        time = cases[slow].time
        if time is None or more_us < _UNEVEN * time.step_us:
            continue
        by_line = taken[slow].sub(taken[fast], fill_value=0.0).drop("", errors="ignore")
        yield Fault(
            f"kernels of rank {slow:,} take {format_us(more_us)} of {format_us(time.step_us)} longer than those of "
            f"rank {fast:,}, which makes the same calls and waits",
            "share the work, or do it outside of the step",
            str(by_line.idxmax()) if len(by_line) else "",
            gives_us=(0.0, more_us),
        )


def _by_line(case: Case) -> pd.Series:
    """Time of the timed step's kernels by the script's line, collectives left out."""
    kernels = case.kernels
    computes = kernels[(kernels["call"] < 0).to_numpy() & (kernels["family"] != "communication").to_numpy()]
    lines = computes["op"].map(case.lines_of_operations).fillna("")
    return computes["duration_us"].groupby(lines).sum()


@rule("FD303", "shares of the global batch that differ", "steps", of_job=True)
def uneven_batches(cases: Mapping[int, Case]) -> Iterator[Fault]:
    """Ranks read different numbers of samples in a step, though gradients are averaged as if all read the same.

    A sampler without `drop_last`, or one that does not know of all data-parallel ranks, divides the batch unevenly: the
    ranks with fewer samples wait, and each of their samples counts for more.

    The rule sees ranks whose models get inputs of one shape but for their first dimension, which differs. It is not
    sure of inputs without another dimension, which may be the tokens of packed sequences.

    **Mend**: `DistributedSampler(..., drop_last=True)`, or weight each rank's loss by its samples.
    """
    read: dict[str, dict[int, int]] = {}
    for rank, case in cases.items():
        steps = case.table("steps")
        steps = steps[(steps["samples"] > 0).to_numpy() & (steps["name"] == "").to_numpy()]
        if len(steps):
            last = steps.iloc[-1]
            read.setdefault(str(last["sample_shape"]), {})[rank] = int(last["samples"])
    for shape, samples in read.items():
        most, least = max(samples.values()), min(samples.values())
        if most > least:
            fewer = [rank for rank, number in samples.items() if number == least]
            others = [rank for rank, number in samples.items() if number == most]
            yield Fault(
                f"ranks {format_rank_list(others)} read {most:,} samples a step, and ranks {format_rank_list(fewer)} "
                f"{least:,}",
                "a sampler with drop_last=True, or losses weighted by samples",
                is_certain=bool(shape),
            )


@rule("FD304", "a model replicated in a group that shards nothing", "blocks", "calls", "groups", "spans")
def replicated_state(case: Case) -> Iterator[Fault]:
    """All ranks of a group hold the same parameters, gradients and optimizer state, and these fill the GPU.

    The rule sees a group that all-reduces all gradients, and a quarter or more of the GPU's memory in what its ranks
    all hold. Replicas of a small model are usual. It says nothing if the group gathers what the ranks' optimizers
    update, as ZeRO-1 does: that is replicated by choice.

    **Mend**: `fully_shard` (FSDP2), a distributed optimizer, or `ZeroRedundancyOptimizer`.
    """
    evidence = case.evidence
    group = evidence.replicas
    capacity = case.summary.capacity_bytes
    if group is None or not capacity:
        return
    held = sum(evidence.at_peak(evidence.category(name)) for name in ("parameter", "gradient", "optimizer_state"))
    calls = evidence.last_calls
    gathers = calls["operation"].str.startswith(("broadcast", "all_gather")) & (calls["phase"] == "optimizer")
    if held < _REPLICAS_SHARE * capacity or (gathers & (calls["group"] == group.number)).any():
        return
    rules = ("shard-parameters", "shard-gradients", "shard-optimizer")
    advice = next((piece for piece in case.summary.advice if piece.rule in rules), None)
    low = advice.gives_low_bytes if advice else None
    yield Fault(
        f"all {group.size:,} ranks of {group.label} hold the same {format_bytes(held)} of parameters, gradients and "
        "optimizer state",
        advice.title if advice else "fully_shard the model over the group",
        gives_bytes=(low or 0, advice.gives_bytes) if advice else None,
        costs_bytes=held,
        advice=advice.rule if advice else "",
    )
