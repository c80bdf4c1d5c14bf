"""Rules of distribution: what the ranks of a job hold or do more than once."""

from __future__ import annotations

from collections.abc import Iterator

from fakedist.findings.case import Case
from fakedist.findings.registry import Fault, rule
from fakedist.units import format_bytes

_REPLICAS_SHARE = 0.25


@rule("FD304", "a model replicated in a group that shards nothing", "blocks", "calls", "groups", "spans")
def replicated_state(case: Case) -> Iterator[Fault]:
    """All ranks of a group hold the same parameters, gradients and optimizer state, and these fill the GPU.

    The rule sees a group that all-reduces all gradients, and a quarter or more of the GPU's memory in what its ranks
    all hold. Replicas of a small model are usual.

    **Mend**: `fully_shard` (FSDP2), a distributed optimizer, or `ZeroRedundancyOptimizer`.
    """
    evidence = case.evidence
    group, capacity = evidence.replicas, case.summary.capacity_bytes
    if group is None or not capacity:
        return
    names = ("parameter", "gradient", "optimizer_state")
    held = sum(evidence.at_peak(evidence.category(name)) for name in names)
    if held < _REPLICAS_SHARE * capacity:
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
