"""What makes a step's interval wide, and what measurement would narrow it."""

from __future__ import annotations

from fakedist.report.text.sheet import KEY, Sheet, SheetColumn
from fakedist.run.step_time import KernelSource, UncertainPart

_CALIBRATE = "a trace of your GPU: fakedist calibrate RUN --from-trace TRACE"
_OWN = "own times"


def uncertainty_sheets(source: KernelSource) -> list[Sheet]:
    """A table of the largest parts of the interval; none without an interval.

    Args:
        source: Where the step's time comes from.
    """
    parts, step_us = source.uncertain, source.step_us or 1.0
    if not parts:
        return []
    widths = [f"+{part.half_width_us / step_us:.1%}" for part in parts]
    return [
        Sheet(
            "What makes the step's interval wide, estimated",
            [
                SheetColumn("estimate of", [_named(part) for part in parts], is_text=True),
                SheetColumn("alone", widths, rank=KEY),
                SheetColumn("of the variance", [f"{part.share:.0%}" for part in parts], rank=1),
                SheetColumn("narrower with", [_measurement(part) for part in parts], is_text=True),
            ],
            ["alone: how much longer the step may be because of this estimate only"],
        )
    ]


def _named(part: UncertainPart) -> str:
    return f"{part.name} on {part.group}" if part.kind == "collectives" else part.name


def _measurement(part: UncertainPart) -> str:
    if part.kind == "kernels":
        return "a trace of more steps" if part.name == _OWN else _CALIBRATE
    if part.kind == "host":
        return "a profile of the job: how long the GPU waits for launches"
    if part.num_nodes > 1:
        return f"nccl-tests over {part.num_nodes:,} of your nodes: --fabric my_fabric.toml with spread"
    return "nccl-tests in one of your nodes, to compare with the time by group"
