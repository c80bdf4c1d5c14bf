"""Many played steps: whether memory is too small by step N."""

from __future__ import annotations

from functools import partial

import numpy as np

from fakedist.extras.play.long_runs import PlayedSteps
from fakedist.report.content.report_blocks import (
    Block,
    Fact,
    Facts,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
)
from fakedist.results.verdict import short_line
from fakedist.rundir.notes import counted
from fakedist.rundir.plain import to_plain
from fakedist.units import format_bytes

_NUM_ROWS = 10


def long_run_report(played: PlayedSteps) -> Report:
    """Played steps: how often memory does not suffice, over the steps and under other settings."""
    part, low, high = played.without_memory
    answer = (
        f"{part:.1%} of runs are out of memory by step {played.num_steps:,} (95% confidence: {low:.1%} to {high:.1%})"
    )
    text = f"{answer}; PyTorch has {format_bytes(played.playable.room_bytes)}"
    blocks: list[Block] = [
        Verdict(text, "out_of_memory"),
        _facts(played),
        _steps_sheet(played),
        _settings_sheet(played),
    ]
    return Report("play", blocks, partial(_long_run_object, played), lambda: played.steps)


def _facts(played: PlayedSteps) -> Facts:
    """The run, its lengths and what follows them."""
    kinds = played.playable.kinds
    recorded = sorted({kind.length for kind in kinds.steps})
    facts = [
        ("run", str(played.playable.run.path)),
        ("lengths", f"{played.lengths}; {counted(played.settings[0].num_seeds, 'seed')} of {played.num_steps:,} steps"),
        ("steps", f"{counted(len(kinds.steps), 'step')} of {counted(len(recorded), 'length')}: {_span(recorded)}"),
    ]
    if kinds.left_out:
        text = f"step {', '.join(map(str, kinds.left_out))}: its blocks are not those of the steps around it"
        facts.append(("without", text))
    facts += [("with", text) for text in played.sequence_texts]
    part, outside = kinds.fitted_part(), ~played.steps["length"].between(recorded[0], recorded[-1])
    if part < 1:
        text = f"{part:.1%} of a step's bytes follow its length to the byte; others are the nearest recorded step's"
        facts.append(("sizes", text))
    if outside.any():
        text = f"{outside.mean():.1%} of the played steps are shorter or longer than any recorded one"
        facts.append(("beyond", text))
    return Facts([Fact(*row) for row in facts])


def _span(values: list[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _steps_sheet(played: PlayedSteps) -> Sheet:
    """Memory over the steps: the most of any seed up to each."""
    steps = played.steps
    at = np.unique(np.linspace(1, played.num_steps, _NUM_ROWS).astype(int))
    so_far = [steps[steps["step"] <= number] for number in at]
    columns = [
        SheetColumn("by step", [f"{number:,}" for number in at]),
        bytes_column("allocated", [int(rows["peak_allocated_bytes"].max()) if len(rows) else 0 for rows in so_far]),
        bytes_column("reserved", [int(rows["peak_reserved_bytes"].max()) if len(rows) else 0 for rows in so_far]),
        SheetColumn(
            "out of memory", [f"{sum(step <= number for step in played.settings[0].failed_steps)}" for number in at]
        ),
    ]
    remarks = ["played as recorded, the peaks are the recorded ones"]
    if failure := played.failure:
        line = short_line(failure.line, played.playable.run.manifest.cwd)
        unused = failure.reserved_bytes - failure.allocated_bytes
        held = f"{format_bytes(failure.allocated_bytes)} allocated and {format_bytes(unused)} reserved beyond that"
        remarks.insert(
            0,
            f"seed {failure.seed} fails in step {failure.step:,} (length {failure.length:,}): {failure.operation} at "
            f"{line or 'a backward'} asks for {format_bytes(failure.requested_bytes)}, with {held}, in other pieces",
        )
    return Sheet("Memory over the steps, simulated: the most of any seed", columns, remarks)


def _settings_sheet(played: PlayedSteps) -> Sheet:
    """Sheet of these steps under other settings of the allocator."""
    settings = played.settings
    columns = [
        SheetColumn("setting", [setting.name for setting in settings], is_text=True),
        SheetColumn("out of memory", [f"{len(setting.failed_steps)} of {setting.num_seeds}" for setting in settings]),
        SheetColumn(
            "first at step", [f"{min(setting.failed_steps):,}" if setting.failed_steps else "-" for setting in settings]
        ),
        bytes_column("reserved", [setting.peak_reserved_bytes for setting in settings]),
        SheetColumn("cudaMalloc calls a step", [f"{setting.num_mallocs:,.2f}" for setting in settings]),
    ]
    own = settings[0]
    cures = [setting.name for setting in settings[1:] if len(setting.failed_steps) < len(own.failed_steps)]
    remarks = [f"less often out of memory: {'; '.join(cures) or 'none of them'}"] if own.failed_steps else []
    return Sheet("The same steps under other settings", columns, remarks)


def _long_run_object(played: PlayedSteps) -> dict[str, object]:
    part, low, high = played.without_memory
    kinds = played.playable.kinds
    return {
        "run_directory": str(played.playable.run.path),
        "lengths": played.lengths,
        "num_steps": played.num_steps,
        "room_bytes": played.playable.room_bytes,
        "recorded_steps": [{"step": kind.number, "name": kind.name, "length": kind.length} for kind in kinds.steps],
        "sequence": played.sequence_texts,
        "left_out": kinds.left_out,
        "fitted_part": kinds.fitted_part(),
        "out_of_memory": {"part": part, "low": low, "high": high},
        "failure": None if played.failure is None else to_plain(played.failure),
        "settings": [to_plain(setting) for setting in played.settings],
    }
