"""Reports plans: a job on another machine, changes for a size of memory, and schedules of a recorded pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from fakedist.analysis.topology import axes_of
from fakedist.extras.plan.fitting import FitPlan, Fitted, key_of
from fakedist.extras.plan.other_machine import GroupThere, MachinePlan
from fakedist.extras.plan.pipeline_plans import Planned, megatron_layout
from fakedist.extras.plan.pipeline_units import PipelineModel
from fakedist.options import profile_command
from fakedist.report.content.report_blocks import (
    Block,
    Chart,
    Drawing,
    Fact,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
    count_column,
    share_column,
    text_column,
    us_column,
)
from fakedist.report.content.wording import run_title
from fakedist.report.figures.time_figures import activity_lanes, lane_names
from fakedist.report.page.assets import figure_object
from fakedist.results.job_time import JobTime
from fakedist.results.run import Run
from fakedist.results.token_budget import Estimate
from fakedist.results.verdict import relative_time, short_line, span_text, span_us, step_text
from fakedist.rundir.notes import listed
from fakedist.rundir.plain import to_plain
from fakedist.rundir.summary import Remedy
from fakedist.units import format_bytes, format_number, format_us, format_us_change

_ORDER = ("does not fit", "may fit", "fits")
#: From this share of the step on, a tensor parallel group's collectives ask whether fewer ranks pay.
_MUCH = 0.1
_AS_RECORDED = (
    "Memory is replayed and kernels are those that PyTorch chose on the recorded GPU: workspaces and attention may be "
    "others there."
)


def machine_report(runs: Sequence[Run], plan: MachinePlan) -> Report:
    """A job on another machine."""
    blocks: list[Block] = [Verdict(_machine_verdict(plan)), _machine_facts(runs, plan), _steps(plan), _ranks(plan)]
    blocks += [_remedies(plan)] if any(rank.remedy for rank in plan.ranks) else []
    blocks += [_alternatives(plan)] if plan.alternatives else []
    blocks += [_groups(plan)] if plan.groups else []
    blocks.append(Items("Notes on these figures", _notes(plan)))

    plain = {"runs": [str(run.path) for run in runs], **vars(plan), "gpu": plan.gpu.name}
    return Report("plan", blocks, lambda: to_plain(plain))


def _machine_verdict(plan: MachinePlan) -> str:
    rank = min(plan.ranks, key=lambda one: (_ORDER.index(one.need.fits), -one.need.high_bytes))
    needs = f"{span_text(rank.need.low_bytes, rank.need.high_bytes)} of {format_bytes(plan.gpu.memory_bytes)}"
    what = f"{rank.need.fits.capitalize()} there: rank {rank.rank} needs {needs}"
    return f"{what}; the step takes {_us(plan.there)}, {relative_time(plan.there.value, plan.here.value)}"


def _us(step: Estimate) -> str:
    return span_us(step.value, step.low, step.high)


def _machine_facts(runs: Sequence[Run], plan: MachinePlan) -> Facts:
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


_UNMAPPED = (
    "How the script makes {} is not known, so these plans are replayed alone: give its flags with --apply "
    "'{}=--FLAG VALUE', or in pyproject.toml under [tool.fakedist.plan.apply]"
)
#: A recording this far from the replayed need shows that the flags do something else.
_OFF = 0.02
_NO_HOST = (
    "needs: reserved once the allocator has freed its caches; without the host: the step if the host launched in no "
    "time, which other work on this machine does not move"
)


def fit_report(fitted: Fitted) -> Report:
    """Plans for a size of memory."""
    blocks: list[Block] = [Verdict(_fit_verdict(fitted)), _fit_facts(fitted)]
    if fitted.plans:
        blocks += [_plans(fitted), Items("The changes", [*_changes(fitted)])]
        if commands := [profile_command(plan.job) for plan in fitted.plans if plan.job]:
            blocks.append(Items("To type", commands, is_code=True))
        blocks += [Remark(text) for text in _differing(fitted)]
        if keys := [*dict.fromkeys(key for plan in fitted.plans for key in plan.unmapped)]:
            blocks.append(Remark(_UNMAPPED.format(listed(keys), keys[0])))
    return Report("plan", blocks, lambda: _fit_object(fitted))


def best_of(fitted: Fitted) -> FitPlan | None:
    """The plan of the shortest step among those that fit when recorded, else the first that fits when replayed."""
    ran = [plan for plan in fitted.plans if _step_us(plan) is not None and _fit_plan_object(plan)["fits"]]
    replayed = [plan for plan in fitted.plans if plan.recorded is None or plan.recorded.run is None]
    surely = [plan for plan in replayed if plan.need.fits == "fits"]
    return min(ran, key=lambda plan: _step_us(plan) or 0.0) if ran else next(iter(surely), None)


def _step_us(plan: FitPlan) -> float | None:
    if plan.recorded is None or plan.recorded.run is None or plan.recorded.run.summary.time is None:
        return None
    return plan.recorded.run.summary.time.step_us


def _fit_verdict(fitted: Fitted) -> str:
    size, best = format_bytes(fitted.size_bytes), best_of(fitted)
    if fitted.need.fits == "fits":
        return f"Fits {size} as it is: needs {format_bytes(fitted.need.high_bytes)}"
    if best is not None:
        if best.recorded is not None and best.recorded.run is not None:
            took = f"recorded, it allocates {format_bytes(best.recorded.run.peak_allocated_bytes)}"
            return f"Fits {size} with: {listed(best.titles)}; {took}, and the step takes {_of_step(fitted, best)}"
        return f"Fits {size} with: {listed(best.titles)}; replayed, it needs {_need(best)}"
    if fitted.plans:
        return f"May fit {size}: no plan is known to, and none was recorded that does"
    nearest = fitted.nearest
    least = f"the nearest, {listed(nearest.titles)}, needs {_need(nearest)}" if nearest and nearest.changes else ""
    return f"Does not fit {size} with any of {fitted.num_tried:,} combinations of known changes; {least}".rstrip("; ")


def _need(plan: FitPlan) -> str:
    return span_text(plan.need.low_bytes, plan.need.high_bytes)


def _of_step(fitted: Fitted, plan: FitPlan) -> str:
    before, after = fitted.run.summary.time, _step_us(plan)
    return "not known" if before is None or after is None else relative_time(after, before.step_us)


def _fit_facts(fitted: Fitted) -> Facts:
    summary = fitted.run.summary
    allocated = f"{format_bytes(summary.peak_allocated_bytes)} allocated; measured, rank {summary.rank}"
    facts = [
        Fact("job", run_title(fitted.run), is_code=True),
        Fact("needs", f"{format_bytes(summary.peak_reserved_bytes)} reserved", allocated),
    ]
    if (outside := summary.estimated_outside) is not None:
        text = "of the GPU for the CUDA context and NCCL, estimated; no change takes it away"
        facts.append(Fact("and", span_text(outside.low_bytes, outside.high_bytes), text))
    if summary.time is not None:
        facts.append(Fact("step", step_text(summary.time), "estimated"))
    return Facts(facts)


def _plans(fitted: Fitted) -> Sheet:
    plans, time = fitted.plans, fitted.run.summary.time
    runs = [None if plan.recorded is None else plan.recorded.run for plan in plans]
    columns = [
        SheetColumn("plan", [str(number) for number in range(1, len(plans) + 1)]),
        text_column("needs, replayed", [_need(plan) for plan in plans]),
        text_column("step, estimated", [_priced(fitted, plan) for plan in plans]),
    ]
    if any(runs):
        columns[2:2] = [
            bytes_column("recorded, allocated", [None if run is None else run.peak_allocated_bytes for run in runs]),
            bytes_column("reserved", [None if run is None else run.peak_reserved_bytes for run in runs], rank=1),
        ]
    if any(runs) and time is not None:
        columns.append(SheetColumn("recorded", [_of_step(fitted, plan) if _step_us(plan) else "-" for plan in plans]))
        before = fitted.without_host_us
        known = [plan.recorded.without_host_us if plan.recorded else None for plan in plans]
        changes = [relative_time(us, before) if us and before else "-" for us in known]
        columns.append(SheetColumn("without the host", changes, rank=1))
        columns.append(us_column("its step", [_step_us(plan) for plan in plans], rank=2))
    columns.append(text_column("", [_outcome(fitted, plan) for plan in plans]))
    remarks = [f"plan {number}: {listed(plan.titles)}" for number, plan in enumerate(plans, 1)]
    remarks += [_NO_HOST] if any(runs) else []
    return Sheet(f"Plans of {fitted.num_tried:,} combinations, the least time first", columns, remarks)


def _priced(fitted: Fitted, plan: FitPlan) -> str:
    time = fitted.run.summary.time
    if time is None:
        return "not timed"
    low, high = (f"{us / time.step_us:+.1%}" for us in (plan.low_us, plan.high_us))
    span = low if low == high else f"{low} to {high}"
    return f"{span}, without {listed(plan.unpriced)}" if plan.unpriced else span


def _outcome(fitted: Fitted, plan: FitPlan) -> str:
    """Chosen, or why another plan is."""
    best, ran, own = best_of(fitted), plan.recorded, _step_us(plan)
    if plan is best:
        return "chosen"
    if ran is None:
        return f"not recorded: no flags for {listed(plan.unmapped)}" if plan.unmapped else plan.need.fits
    if ran.run is None:
        return f"failed: {ran.failure}"
    if not ran.run.fits:
        return "does not fit"
    least = None if best is None else _step_us(best)
    return "fits" if own is None or least is None else f"slower: {format_us_change(own - least)}"


def _changes(fitted: Fitted) -> Iterator[str]:
    """Each change of the plans, how it is made, and its line."""
    for change in dict.fromkeys(change for plan in fitted.plans for change in plan.changes):
        line = short_line(change.line, fitted.run.manifest.cwd).partition(" (")[0]
        yield f"{change.title}: {change.text}{f' ({line})' if line else ''}"


def _differing(fitted: Fitted) -> Iterator[str]:
    """Sentences on plans whose recording is not what was replayed."""
    unused = max(fitted.run.peak_reserved_bytes - fitted.run.peak_allocated_bytes, 0)
    for number, plan in enumerate(fitted.plans, 1):
        run = None if plan.recorded is None else plan.recorded.run
        if run is None:
            continue
        most = (plan.need.high_bytes - unused) * (1 + _OFF)
        if not plan.need.low_bytes * (1 - _OFF) <= run.peak_allocated_bytes <= most:
            yield f"Plan {number} does not allocate what was replayed: its flags may do something else than the change."


def _fit_object(fitted: Fitted) -> dict[str, object]:
    best = best_of(fitted)
    return {
        "run": str(fitted.run.path),
        "size_bytes": fitted.size_bytes,
        "need": to_plain(fitted.need),
        "step_us": None if fitted.run.summary.time is None else fitted.run.summary.time.step_us,
        "num_tried": fitted.num_tried,
        "chosen": None if best is None else fitted.plans.index(best) + 1,
        "nearest": None if fitted.nearest is None else _fit_plan_object(fitted.nearest),
        "plans": [_fit_plan_object(plan) | {"outcome": _outcome(fitted, plan)} for plan in fitted.plans],
    }


def _fit_plan_object(plan: FitPlan) -> dict[str, object]:
    ran = plan.recorded
    return {
        "changes": [{"key": key_of(change), "title": change.title, "text": change.text} for change in plan.changes],
        "need": to_plain(plan.need),
        "price_low_us": plan.low_us,
        "price_high_us": plan.high_us,
        "unpriced": list(plan.unpriced),
        "unmapped": list(plan.unmapped),
        "command": None if plan.job is None else profile_command(plan.job),
        "run": None if ran is None or ran.run is None else str(ran.run.path),
        "recorded_allocated_bytes": None if ran is None or ran.run is None else ran.run.peak_allocated_bytes,
        "recorded_reserved_bytes": None if ran is None or ran.run is None else ran.run.peak_reserved_bytes,
        "recorded_step_us": _step_us(plan),
        "fits": None if ran is None or ran.run is None else ran.run.fits,
        "failure": "" if ran is None else ran.failure,
    }


_LANES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "tail": "optimizer"}
_WORDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights", "tail": "optimizer"}
_TRANSFERS = {"SEND_F": "send", "SEND_B": "send of gradients", "RECV_F": "receive", "RECV_B": "receive of gradients"}
_LEAST = (
    "at least: the recorded backwards make the gradients of inputs and weights together, and these schedules divide "
    "them. Record the script once with a schedule that does, such as ScheduleZBVZeroBubble or "
    "ScheduleInterleavedZeroBubble: fakedist profile --rank stages -o RUNS ..., then fakedist plan RUNS --pipeline"
)
_READING = (
    "even: the recorded layout, or as many layers for each stage; ZB-H1: ScheduleInterleavedZeroBubble with one stage "
    "on each rank"
)
_CHART = "Each rank computes above and sends and receives below. Drag to zoom in, double-click for all of it."


def pipeline_report(job: JobTime, model: PipelineModel, plans: Sequence[Planned], refused: Sequence[str]) -> Report:
    """The plans of a job's pipeline, next to its step as it was recorded."""
    best = plans[0]
    blocks: list[Block] = [
        Verdict(_pipeline_verdict(job, model, best)),
        _pipeline_facts(job, model),
        _sheet(model, plans),
        _stages(model, best),
    ]
    blocks.append(Chart("lanes", f"The step by {_name(best)}", partial(_drawing, best), "estimated", _CHART))
    if balanced := [one for one in plans if one.is_balanced]:
        texts = {len(one.layout): _layout_texts(model, one) for one in balanced}
        blocks.append(
            Items("Balanced layouts, to type", [text for own in texts.values() for text in own], is_code=True)
        )
    if refused:
        blocks.append(Items("Not planned", refused))
    return Report("plan", blocks, lambda: _pipeline_object(job, model, plans, refused))


def _name(plan: Planned) -> str:
    return plan.order.name + (" with a balanced layout" if plan.is_balanced else "")


def _pipeline_verdict(job: JobTime, model: PipelineModel, best: Planned) -> str:
    whole = job.summary.step_us
    change = relative_time(best.step_us / best.order.num_micro_batches, whole / model.ranks[0].num_micro_batches)
    text = f"{_name(best)} takes least: {format_us(best.step_us)} for {best.order.num_micro_batches} micro-batches"
    return f"{text}, {change} for each, with a bubble of {best.bubble:.0%}"


def _pipeline_facts(job: JobTime, model: PipelineModel) -> Facts:
    step = job.summary
    bubble = sum(stage.bubble_us for stage in step.stages) / len(step.stages) / step.step_us
    facts = [
        Fact("job", run_title(job.runs[0]), is_code=True),
        Fact(
            "step",
            span_us(step.step_us, step.step_low_us, step.step_high_us),
            f"estimated, as recorded: {model.ranks[0].num_micro_batches} micro-batches on {len(step.stages)} ranks, "
            f"a bubble of {bubble:.0%}",
        ),
    ]
    return Facts(facts)


def _sheet(model: PipelineModel, plans: Sequence[Planned]) -> Sheet:
    most = [max(range(len(one.peak_bytes)), key=[peak or 0.0 for peak in one.peak_bytes].__getitem__) for one in plans]
    peaks = [None if None in one.peak_bytes else one.peak_bytes[rank] for one, rank in zip(plans, most, strict=True)]
    has_several = len({one.order.num_micro_batches for one in plans}) > 1
    known = ["" if one.is_known else "at least" for one in plans]
    columns = [
        text_column("schedule", [one.order.name for one in plans]),
        count_column("micro-batches", [one.order.num_micro_batches for one in plans]),
        text_column("layout", ["balanced" if one.is_balanced else "even" for one in plans]),
        *([text_column("", known)] if any(known) else []),
        us_column("step", [one.step_us for one in plans]),
        *(
            [us_column("for each micro-batch", [one.step_us / one.order.num_micro_batches for one in plans])]
            if has_several
            else []
        ),
        share_column("bubble", [one.bubble if one.is_known else None for one in plans]),
        bytes_column("peak allocated", peaks),
        count_column(
            "on rank", [None if peak is None else rank for rank, peak in zip(most, peaks, strict=True)], rank=1
        ),
        text_column("", [one.fits for one in plans]),
    ]
    return Sheet(
        "Schedules: steps estimated, memory replayed, the least time for each micro-batch first",
        columns,
        [_READING, *([_LEAST] if any(known) else [])],
        is_open=True,
    )


def _stages(model: PipelineModel, plan: Planned) -> Sheet:
    """The ranks of a plan."""
    own = [[stage for stage, of in enumerate(plan.order.rank_of) if of == rank] for rank in range(len(plan.busy_us))]
    columns = [
        count_column("rank", range(len(own))),
        text_column("stages", [", ".join(map(str, stages)) for stages in own]),
        text_column("modules", ["; ".join(_modules(model, plan.layout[stage]) for stage in stages) for stages in own]),
        us_column("computes", plan.busy_us),
        share_column("bubble", [1 - us / plan.step_us for us in plan.busy_us]),
        bytes_column("peak allocated", plan.peak_bytes),
    ]
    return Sheet(f"Ranks by {_name(plan)}", columns)


def _modules(model: PipelineModel, units: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(_module(model, unit) for unit in (units[0], units[-1])))


def _module(model: PipelineModel, unit: int) -> str:
    """A unit's name, without the number of the model that has it."""
    return model.units[unit].name.rpartition(").")[2]


def _layout_texts(model: PipelineModel, plan: Planned) -> list[str]:
    points = ", ".join(_module(model, units[0]) for units in plan.layout[1:])
    return [f"--pipeline-model-parallel-layout '{megatron_layout(model, plan.layout)}'", f"split before: {points}"]


def _drawing(plan: Planned) -> Drawing:
    rows = plan.actions
    is_own = rows["kind"].isin(list(_LANES))
    labels = [f"rank {rank}{kind}" for rank in range(len(plan.busy_us)) for kind in ("", " sends")]
    of = ", stage " + rows["stage"].astype(str) + ", micro-batch " + rows["micro_batch"].astype(str)
    text = rows["kind"].map(_WORDS | _TRANSFERS) + of.where(rows["stage"] >= 0, "")
    label = "rank " + rows["rank"].astype(str) + is_own.map({True: "", False: " sends"})
    lanes = rows.assign(label=label, lane=rows["kind"].map(_LANES).fillna("communication"), text=text)
    title = f"The step by {_name(plan)}, {format_us(plan.step_us)} (estimated)"
    figure = activity_lanes(lanes, labels, title)
    return Drawing({"lanes": figure_object(figure)}, {"step_ms": plan.step_us / 1e3}, {"names": lane_names(lanes)})


def _pipeline_object(job: JobTime, model: PipelineModel, plans: Sequence[Planned], refused: Sequence[str]) -> object:
    return to_plain(
        {
            "runs": [str(run.path) for run in job.runs],
            "recorded": {"step_us": job.summary.step_us, "num_micro_batches": model.ranks[0].num_micro_batches},
            "units": [
                {"name": unit.name, **{kind: cost._asdict() for kind, cost in unit.costs.items()}}
                for unit in model.units
            ],
            "plans": [_pipeline_plan_object(model, one) for one in plans],
            "refused": list(refused),
        }
    )


def _pipeline_plan_object(model: PipelineModel, plan: Planned) -> dict[str, object]:
    return {
        "schedule": plan.order.name,
        "num_micro_batches": plan.order.num_micro_batches,
        "balanced": plan.is_balanced,
        "known": plan.is_known,
        "step_us": plan.step_us,
        "bubble": plan.bubble if plan.is_known else None,
        "busy_us": list(plan.busy_us),
        "peak_allocated_bytes": list(plan.peak_bytes),
        "layout": [[model.units[unit].name for unit in units] for units in plan.layout],
        "megatron_layout": megatron_layout(model, plan.layout),
        "actions": plan.actions.to_dict("records"),
    }
