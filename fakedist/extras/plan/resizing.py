"""A rank's recording as if its job had another number of GPUs, all of the difference in data parallel ranks.

The rank does the same on as many tokens of its own. Groups grow along the data parallel axis, and the shards that they
hold get smaller: parameters, gradients and optimizer state of FSDP, optimizer state of a sharded optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pandas as pd

from fakedist.analysis.evidence import BLOCK_BYTES, Evidence, curve, kept_gradients
from fakedist.analysis.memory_tables import fold_layers
from fakedist.analysis.topology import axes_of, find_replicas, read_groups
from fakedist.errors import JobError
from fakedist.results.run import Run, evidence_tables
from fakedist.units import format_rank_list, parse_rank_list

_OPTIMIZER = "optimizer"
_WORDS = {"": "", _OPTIMIZER: "optimizer states", "all": "parameters, gradients and optimizer states"}


@dataclass(frozen=True)
class Progression:
    """Ranks of a group at equal distances."""

    first: int
    stride: int
    size: int

    @property
    def extent(self) -> int:
        """Ranks after which the next group of its kind begins, where no other axis lies within."""
        return self.stride * self.size

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Progression | None:
        """None if the distances differ."""
        strides = set(np.diff(ranks).tolist())
        return cls(ranks[0], strides.pop() if strides else 1, len(ranks)) if len(strides) <= 1 else None


@dataclass(frozen=True)
class Resized:
    """A run as if its job had another size.

    Attributes:
        run: With the groups of that size, and kernels of the optimizer on its shards; its memory is the recorded one.
        tables: The tables that advice reads, with the shards of that size; None if the run lacks them.
        sharded: What the ranks whose number changed shard: "parameters, gradients and optimizer state", or nothing.
    """

    run: Run
    tables: dict[str, pd.DataFrame] | None
    sharded: str = ""


def resize(run: Run, num_gpus: int) -> Resized:
    """The run as if its job had so many GPUs.

    Raises:
        JobError: The groups do not show the data parallel ranks, or these are not a whole number there.
    """
    job, tables = run.manifest.job, evidence_tables(run)
    if job is None:
        raise JobError(f"{run.path} is not the run of a rank of a job", "fakedist profile -o RUN ... makes one")
    if num_gpus == job.world_size:
        return Resized(run, tables)
    factor, calls = Fraction(num_gpus, job.world_size), run.table("calls")
    axis = _data_axis(run.table("groups"), calls, job.world_size, job.rank)
    groups, resized = _groups(run.table("groups"), axis, factor, job.world_size)
    shards = _sharded(calls, resized)
    if shards == _OPTIMIZER and factor < 1:
        raise JobError(
            "fewer GPUs hold larger shards of the optimizer, in buffers of a size that the run does not show",
            f"record it: fakedist profile --world-size {num_gpus} ...",
        )
    job = replace(job, world_size=num_gpus, rank=_moved(job.rank, axis, factor))
    changed = {"groups": groups}
    if shards:
        changed["work"] = _optimizer_work(run.table("launches"), run.table("work"), factor)
    if tables is not None and shards:
        tables = _with_shards(tables, factor, only_optimizer=shards == _OPTIMIZER)
    known = None if tables is None else {**tables, "groups": groups}
    return Resized(run.changed(replace(run.manifest, job=job), changed), known, _WORDS[shards])


def _data_axis(groups: pd.DataFrame, calls: pd.DataFrame, world_size: int, rank: int) -> Progression:
    """The ranks along the outermost data parallel axis."""
    replicas = find_replicas(groups, calls, world_size)
    rows = [group for group in read_groups(groups) if group.size > 1 and group.ranks]
    named = [group for group in rows if axes_of(group.label) == {"data"}]
    if not named:
        named = [group for group in rows if group.size == world_size == replicas.number]
    found = [Progression.of(parse_rank_list(group.ranks)) for group in named]
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found) or not replicas.number:
        raise JobError(
            f"another number of GPUs cannot be told from rank {rank}: "
            + ("no group is known to be data parallel" if replicas.number else replicas.text),
            "record the job with it: fakedist profile --world-size N ...",
        )
    return max(known, key=lambda one: one.extent)


def _groups(
    groups: pd.DataFrame, axis: Progression, factor: Fraction, world_size: int
) -> tuple[pd.DataFrame, set[int]]:
    """The groups of the larger or smaller job, and the numbers of those whose size changed."""
    rows, resized = groups.copy(), set()
    sizes, texts = rows["size"].tolist(), rows["ranks"].astype(str).tolist()
    for number, (size, text) in enumerate(zip(sizes, texts, strict=True)):
        ranks = parse_rank_list(text) if text else ()
        if size == 1 or not ranks:
            texts[number] = format_rank_list([_moved(rank, axis, factor) for rank in ranks])
            continue
        one = Progression.of(ranks)
        if one is None:
            raise JobError(
                f"the ranks of a group are not at equal distances: {text}",
                "record the job with that number of GPUs",
            )
        stride, new_size = Fraction(one.stride), Fraction(one.size)
        if one.stride >= axis.extent:
            stride *= factor
        elif one.extent in (axis.extent, world_size):
            new_size *= factor
            resized.add(number)
        elif axis.extent % one.extent:
            raise JobError(f"how a group grows with the job is not known: {text}", "record the job with that number")
        if stride.denominator > 1 or new_size.denominator > 1 or new_size < 1:
            raise JobError(
                f"{one.size} ranks of a group would be {float(new_size):g}", "give a number of GPUs that divides evenly"
            )
        first = _moved(one.first, axis, factor)
        sizes[number] = int(new_size)
        texts[number] = format_rank_list([first + place * int(stride) for place in range(int(new_size))])
    return rows.assign(size=sizes, ranks=texts), resized


def _moved(rank: int, axis: Progression, factor: Fraction) -> int:
    """The number of a rank: those within the data axis keep theirs, and stages begin later or sooner."""
    outer, inner = divmod(rank, axis.extent)
    return outer * int(axis.extent * factor) + inner


def _sharded(calls: pd.DataFrame, resized: set[int]) -> str:
    """Name what the resized groups gather: parameters in forward ("all"), the optimizer's results, or nothing."""
    last = calls[calls["step"] == calls["step"].max()]
    own = last[last["group"].isin(resized) & last["operation"].astype(str).str.startswith("all_gather")]
    own = own[own["bytes_out"] > own["bytes_out"].max() / 1000] if len(own) else own
    phases = set(own.loc[own["bytes_out"] > 0, "phase"].astype(str))
    reduced = last[last["group"].isin(resized) & last["operation"].astype(str).str.startswith("reduce_scatter")]
    if phases & {"forward", "backward"} and len(reduced):
        return "all"
    return _OPTIMIZER if phases and len(reduced) else ""


def _optimizer_work(launches: pd.DataFrame, work: pd.DataFrame, factor: Fraction) -> pd.DataFrame:
    """The work of the step, with the optimizer's kernels on shards of another size."""
    known = launches[launches["work"] >= 0]
    is_optimizer = (known["phase"].astype(str) == _OPTIMIZER) & (known["call"] < 0)
    rows = np.setdiff1d(known.loc[is_optimizer, "work"], known.loc[~is_optimizer, "work"])
    changed = work.copy()
    for name in ("flops", "moved_bytes"):
        changed.loc[rows, name] = changed.loc[rows, name] / float(factor)
    return changed


def _with_shards(tables: dict[str, pd.DataFrame], factor: Fraction, *, only_optimizer: bool) -> dict[str, pd.DataFrame]:
    """The tables with shards of another size, and curves of memory that follow."""
    evidence = Evidence(tables, fold_layers(tables["layers"]))
    is_shard = evidence.category("optimizer_state")
    if not only_optimizer:
        is_shard |= evidence.category("parameter") & ~evidence.phase("forward", "backward")
        is_shard[kept_gradients(evidence)[0]] = True
    blocks = tables["blocks"].copy()
    before = blocks["bytes"].to_numpy().copy()
    for name in ("bytes", "requested_bytes"):
        size = blocks[name].to_numpy()
        whole = -(-size * factor.denominator // factor.numerator // BLOCK_BYTES) * BLOCK_BYTES  # rounded up to blocks
        blocks[name] = np.where(is_shard, whole, size)
    events = tables["events"]
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    change = curve(made, freed, blocks["bytes"].to_numpy() - before, len(events)).astype("i8")
    allocated = events["allocated_bytes"].to_numpy() + change
    reserved = events["reserved_bytes"].to_numpy() + change
    peak = int(allocated.argmax()) if len(allocated) else 0
    blocks["at_peak"] = (blocks["alloc_event"] <= peak) & (blocks["free_event"] > peak)
    return {**tables, "blocks": blocks, "events": events.assign(allocated_bytes=allocated, reserved_bytes=reserved)}
