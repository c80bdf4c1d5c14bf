"""Reports a job on another machine: whether it fits, its step, its collectives, and what no longer pays."""

from __future__ import annotations

from collections.abc import Sequence

from fakedist.analysis.topology import axes_of
from fakedist.extras.plan.other_machine import GroupThere, MachinePlan
from fakedist.report.content.report_blocks import (
    Block,
    Fact,
    Facts,
    Items,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
    count_column,
    text_column,
    us_column,
)
from fakedist.report.content.wording import run_title
from fakedist.results.run import Run
from fakedist.results.token_budget import Estimate
from fakedist.results.verdict import relative_time, span_text, span_us
from fakedist.rundir.plain import to_plain
from fakedist.rundir.summary import Remedy
from fakedist.units import format_bytes, format_number

_ORDER = ("does not fit", "may fit", "fits")
#: From this share of the step on, a tensor parallel group's collectives ask whether fewer ranks pay.
_MUCH = 0.1
_AS_RECORDED = (
    "Memory is replayed and kernels are those that PyTorch chose on the recorded GPU: workspaces and attention may be "
    "others there."
)


def machine_report(runs: Sequence[Run], plan: MachinePlan) -> Report:
    """A job on another machine."""
    blocks: list[Block] = [Verdict(_verdict(plan)), _about(runs, plan), _steps(plan), _ranks(plan)]
    blocks += [_remedies(plan)] if any(rank.remedy for rank in plan.ranks) else []
    blocks += [_alternatives(plan)] if plan.alternatives else []
    blocks += [_groups(plan)] if plan.groups else []
    blocks.append(Items("Notes on these figures", _notes(plan)))

    plain = {"runs": [str(run.path) for run in runs], **vars(plan), "gpu": plan.gpu.name}
    return Report("plan", blocks, lambda: to_plain(plain))


def _verdict(plan: MachinePlan) -> str:
    rank = min(plan.ranks, key=lambda one: (_ORDER.index(one.need.fits), -one.need.high_bytes))
    needs = f"{span_text(rank.need.low_bytes, rank.need.high_bytes)} of {format_bytes(plan.gpu.memory_bytes)}"
    what = f"{rank.need.fits.capitalize()} there: rank {rank.rank} needs {needs}"
    return f"{what}; the step takes {_us(plan.there)}, {relative_time(plan.there.value, plan.here.value)}"


def _us(step: Estimate) -> str:
    return span_us(step.value, step.low, step.high)


def _about(runs: Sequence[Run], plan: MachinePlan) -> Facts:
    recorded, there = plan.num_gpus
    facts = [
        Fact("job", run_title(runs[0]), is_code=True),
        Fact("here", f"{recorded:,} {runs[0].summary.gpu}"),
        Fact("there", f"{there:,} {plan.gpu.product}, fabric {plan.fabric}"),
    ]
    return Facts(facts)


def _steps(plan: MachinePlan) -> Facts:
    facts = [Fact("here", _us(plan.here), "90 % interval"), Fact("there", _us(plan.there))]
    if all(plan.tokens):
        per_gpu = [
            (tokens or 0) / step.value * 1e6 / number
            for tokens, step, number in zip(plan.tokens, (plan.here, plan.there), plan.num_gpus, strict=True)
        ]
        facts.append(Fact("tokens/s per GPU", f"{format_number(per_gpu[1])} there, {format_number(per_gpu[0])} here"))
        facts.append(Fact("tokens of a step", f"{plan.tokens[1]:,} there, {plan.tokens[0]:,} here"))
    return Facts(facts, "The step, estimated")


def _ranks(plan: MachinePlan) -> Sheet:
    ranks = plan.ranks
    columns = [
        SheetColumn("rank", [str(rank.rank) for rank in ranks]),
        bytes_column("recorded", [rank.recorded_bytes for rank in ranks]),
        bytes_column("needs at least", [rank.need.low_bytes for rank in ranks]),
        bytes_column("at most", [rank.need.high_bytes for rank in ranks]),
        text_column(
            "context and NCCL",
            [
                span_text(rank.outside_low_bytes, rank.outside_high_bytes) if rank.outside_high_bytes else "not known"
                for rank in ranks
            ],
        ),
        text_column("there", [rank.need.fits for rank in ranks]),
    ]
    unknown = dict.fromkeys(text for rank in ranks for text in rank.unknown)
    return Sheet(
        "Reserved memory: replayed, outside of it estimated", columns, [f"not counted: {text}" for text in unknown]
    )


def _remedies(plan: MachinePlan) -> Items:
    texts = [f"rank {rank.rank}: {_remedy(rank.remedy)}" for rank in plan.ranks if rank.remedy is not None]
    return Items("What would make it fit there, replayed", texts)


def _remedy(remedy: Remedy) -> str:
    high = remedy.step_share_high
    price = "" if high is None else f"; the step +{remedy.step_share or 0.0:.0%} to {high:.0%}"
    needs = span_text(remedy.needs_low_bytes, remedy.needs_high_bytes)
    return f"{'; '.join(remedy.titles)}: then needs {needs}: {remedy.fits}{price}"


def _alternatives(plan: MachinePlan) -> Sheet:
    rows = plan.alternatives
    columns = [
        text_column("change", [row.title for row in rows]),
        text_column("needs", [span_text(row.need.low_bytes, row.need.high_bytes) for row in rows]),
        text_column("", [row.need.fits for row in rows]),
        us_column("step", [None if row.step is None else row.step.value for row in rows]),
        text_column(
            "of the step",
            ["-" if row.step is None else relative_time(row.step.value, plan.there.value) for row in rows],
        ),
    ]
    title = "Changes that this memory allows: replayed, each on its own"
    return Sheet(title, columns, [f"{row.title}: {row.why}" for row in rows])


def _groups(plan: MachinePlan) -> Sheet:
    rows = plan.groups[:8]
    columns = [
        text_column("group", [row.group for row in rows]),
        text_column("operation", [row.operation for row in rows], 1),
        count_column("ranks", [row.size for row in rows]),
        count_column("NVLink domains here", [row.num_nodes[0] for row in rows], 2),
        count_column("there", [row.num_nodes[1] for row in rows], 2),
        us_column("exposed here", [row.exposed_us[0] for row in rows]),
        us_column("there", [row.exposed_us[1] for row in rows]),
    ]
    return Sheet("Collectives of the step, estimated", columns, [*_of_tensors(plan)])


def _of_tensors(plan: MachinePlan) -> list[str]:
    """Sentences on groups of tensor parallel ranks: whether they stay in an NVLink domain, and whether they pay."""
    groups: dict[str, list[GroupThere]] = {}
    for row in plan.groups:
        if "tensor" in axes_of(row.group):
            groups.setdefault(row.group, []).append(row)
    said = []
    for name, rows in groups.items():
        here, there = rows[0].num_nodes
        share = sum(row.exposed_us[1] for row in rows) / plan.there.value
        if there > 1:
            said.append(f"{name} spans {there} NVLink domains there ({here} here): tensor parallel ranks belong in one")
        if share >= _MUCH:
            said.append(f"{name} exposes {share:.0%} of the step there: fewer ranks may pay, which a recording shows")
    return said


def _notes(plan: MachinePlan) -> list[str]:
    here, there = plan.num_gpus
    notes = [_AS_RECORDED]
    if plan.sharded:
        notes.insert(0, f"{there:,} instead of {here:,} GPUs share {plan.sharded}: data parallel ranks come or go.")
    elif here != there:
        notes.insert(0, f"{there:,} instead of {here:,} GPUs: data parallel ranks come or go, which shard nothing.")
    return notes
