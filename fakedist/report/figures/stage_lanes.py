"""What the ranks of a job do during its step: a lane for each."""

from __future__ import annotations

from typing import TypeAlias

import pandas as pd
import plotly.graph_objects as go

from fakedist.report.figures.look import FAMILY_COLOURS, KIND_COLOURS, SOFT, framed, new_figure
from fakedist.run.job_time import JobStep, StageTime
from fakedist.units import format_us

_COLOURS = KIND_COLOURS | {"communication": FAMILY_COLOURS["communication"], "bubble": SOFT}
#: Drawn first, so that what computes covers it.
_ORDER = ("bubble", "communication", "other", "optimizer", "recompute", "backward", "forward", "generation")


Figure: TypeAlias = go.Figure


def stage_lanes(step: JobStep, lanes: pd.DataFrame) -> Figure:
    """The job's step by rank: forward, backward, optimizer, communication and bubble over time.

    Args:
        step: The job's step.
        lanes: What each rank does when: ``JobTime.lanes``.
    """
    figure = new_figure()
    labels = {stage.rank: _label(stage) for stage in step.stages}
    for lane in _ORDER:
        rows = lanes[lanes["lane"] == lane]
        if not len(rows):
            continue
        lasts = rows["end_us"] - rows["start_us"]
        figure.add_bar(
            y=[labels[rank] for rank in rows["rank"]],
            x=lasts / 1e3,
            base=rows["start_us"] / 1e3,
            orientation="h",
            name=lane,
            marker={"color": _COLOURS[lane], "line": {"width": 0}},
            customdata=[format_us(each) for each in lasts],
            hovertemplate="%{customdata} from %{base:.3f} ms<extra>%{y}: " + lane + "</extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    figure.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=list(labels.values()))
    title = f"The job's step by rank, {format_us(step.step_us)} (estimated)"
    framed(figure, title, x="ms", height=200 + 34 * max(len(labels), 2))
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "reversed"}
    return figure.update_layout(legend=legend, margin={"t": 90})


def _label(stage: StageTime) -> str:
    return f"rank {stage.rank}" if stage.stage is None else f"stage {stage.stage}, rank {stage.rank}"
