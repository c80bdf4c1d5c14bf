"""Reports schedules of a recorded pipeline: steps, bubbles and memory, layouts to type, and the lanes of the best."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fakedist.extras.plan.pipeline_plans import Planned, megatron_layout
from fakedist.extras.plan.pipeline_units import PipelineModel
from fakedist.report.content.report_blocks import (
    Block,
    Chart,
    Drawing,
    Fact,
    Facts,
    Items,
    Report,
    Sheet,
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
from fakedist.results.verdict import relative_time, span_us
from fakedist.rundir.plain import to_plain
from fakedist.units import format_us

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
        Verdict(_verdict(job, model, best)),
        _about(job, model),
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
    return Report("plan", blocks, lambda: _object(job, model, plans, refused))


def _name(plan: Planned) -> str:
    return plan.order.name + (" with a balanced layout" if plan.is_balanced else "")


def _verdict(job: JobTime, model: PipelineModel, best: Planned) -> str:
    whole = job.summary.step_us
    change = relative_time(best.step_us / best.order.num_micro_batches, whole / model.ranks[0].num_micro_batches)
    text = f"{_name(best)} takes least: {format_us(best.step_us)} for {best.order.num_micro_batches} micro-batches"
    return f"{text}, {change} for each, with a bubble of {best.bubble:.0%}"


def _about(job: JobTime, model: PipelineModel) -> Facts:
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


def _object(job: JobTime, model: PipelineModel, plans: Sequence[Planned], refused: Sequence[str]) -> object:
    return to_plain(
        {
            "runs": [str(run.path) for run in job.runs],
            "recorded": {"step_us": job.summary.step_us, "num_micro_batches": model.ranks[0].num_micro_batches},
            "units": [
                {"name": unit.name, **{kind: cost._asdict() for kind, cost in unit.costs.items()}}
                for unit in model.units
            ],
            "plans": [_plan_object(model, one) for one in plans],
            "refused": list(refused),
        }
    )


def _plan_object(model: PipelineModel, plan: Planned) -> dict[str, object]:
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
