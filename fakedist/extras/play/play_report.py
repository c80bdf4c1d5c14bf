"""Draws of the load of experts: how often the hottest rank runs out of memory.

Many played steps: whether memory is too small by step N.
"""

from __future__ import annotations

import shlex
from functools import partial

import numpy as np
import pandas as pd

from fakedist.extras.play.long_runs import PlayedSteps
from fakedist.extras.play.router_draws import Playable, Played
from fakedist.report.content.report_blocks import (
    Block,
    Fact,
    Facts,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
    us_column,
)
from fakedist.results.verdict import short_line
from fakedist.rundir.notes import counted
from fakedist.rundir.plain import to_plain
from fakedist.units import format_bytes, format_us

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
        _run_facts(played),
        _steps_sheet(played),
        _settings_sheet(played),
    ]
    return Report("play", blocks, partial(_long_run_object, played), lambda: played.steps)


def _run_facts(played: PlayedSteps) -> Facts:
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


TITLE = "Memory simulated, time estimated: the hottest rank in each draw"
_QUANTILES = {"median": 0.5, "9 in 10": 0.9, "99 in 100": 0.99, "most": 1.0}


def play_report(played: Played) -> Report:
    """Draws: how often memory does not suffice, and what would help."""
    blocks: list[Block] = [
        Verdict(_probability_text(played), "out_of_memory"),
        _facts(played),
        draws_sheet(played),
        remedies_sheet(played),
        sizes_sheet(played),
    ]
    return Report("play", blocks, partial(_play_object, played), lambda: played.draws)


def _facts(played: Played) -> Facts:
    playable, draws = played.playable, played.draws
    ranks = sum(map(len, playable.groups))
    steps = len({of.step for of in playable.counts.passes})
    first, last = int(draws["seed"].iloc[0]), int(draws["seed"].iloc[-1])
    load = f"{played.load}, drawn {len(draws):,} times (seeds {first} to {last}) for {steps} steps each"
    rank = f"of the {ranks} ranks of the recorded rank's stage, the one that receives most in a draw"
    return Facts([Fact("run", str(playable.run.path), is_code=True), Fact("load", load), Fact("rank", rank)])


def _probability_text(played: Played) -> str:
    part, low, high = played.without_memory
    room = format_bytes(played.playable.room_bytes)
    interval = f"95% confidence: {low:.1%} to {high:.1%}"
    return f"{part:.1%} of draws run out of memory ({interval}); PyTorch has {room}"


def draws_sheet(played: Played) -> Sheet:
    """Quantiles of the draws."""
    draws, at = played.draws, list(_QUANTILES.values())
    quantiles = {name: np.quantile(draws[name], at, method="higher").tolist() for name in draws.columns[2:]}
    columns = [
        SheetColumn("draws", list(_QUANTILES), is_text=True),
        bytes_column("allocated", [int(size) for size in quantiles["peak_allocated_bytes"]]),
        bytes_column("reserved", [int(size) for size in quantiles["peak_reserved_bytes"]]),
        SheetColumn("tokens, x the mean", [f"{share:.2f}" for share in quantiles["share"]]),
    ]
    if draws["step_us"].notna().all():
        columns.append(us_column("step", quantiles["step_us"]))
        if draws[["step_low_us", "step_high_us"]].notna().all(axis=None):
            bounds = zip(quantiles["step_low_us"], quantiles["step_high_us"], strict=True)
            texts = [f"{format_us(low)} to {format_us(high)}" for low, high in bounds]
            columns.append(SheetColumn("90% interval", texts))
    even = f"with even loads: {format_bytes(played.even_peak_bytes)} allocated on rank {played.playable.job.rank}"
    if not np.isnan(played.even_step_us):
        even += f", step {format_us(played.even_step_us)}"
    worst, job = played.worst[0], played.playable.job
    command = f"fakedist profile --router-load {shlex.quote(played.load)} --seed {worst.seed} --rank {worst.rank}"
    program = played.playable.program
    total, bounded = len(program.base), len(program.bounded)
    accuracy = "played with the recorded loads, the peaks are the recorded ones"
    if bounded:
        most = format_bytes(program.largest_bounded_bytes)
        accuracy = (
            f"{bounded:,} blocks of up to {most} vary otherwise; played as the largest of them, they bound memory"
        )
    remarks = [
        even,
        f"{played.num_following:,} of {total:,} blocks follow the tokens of experts to the byte in the recording",
        accuracy,
        f"{command} ... runs the draw that needs most (world size {job.world_size:,})",
    ]
    return Sheet(TITLE, columns, remarks)


def remedies_sheet(played: Played) -> Sheet:
    """Changes that would help the draws that need the most memory."""
    worst = played.draws.set_index(["seed", "rank"]).loc[[(draw.seed, draw.rank) for draw in played.worst]]
    names = ["as drawn", *(remedy.name for remedy in played.remedies)]
    most = [int(worst["peak_allocated_bytes"].max()), *(max(remedy.peaks) for remedy in played.remedies)]
    number = [int((~worst["fits"]).sum()), *(remedy.num_without_memory for remedy in played.remedies)]
    dropped = ["-", *(f"{remedy.dropped:.1%}" if remedy.dropped else "-" for remedy in played.remedies)]
    columns = [
        SheetColumn("change", names, is_text=True),
        bytes_column("most allocated", most),
        SheetColumn("out of memory", [f"{n} of {len(worst)}" for n in number]),
        SheetColumn("choices dropped", dropped),
    ]
    return Sheet(f"What would help the {len(worst)} draws that need most", columns, [])


def sizes_sheet(played: Played) -> Sheet:
    """The busiest rank's load and peak by expert parallel size."""
    sizes = played.sizes
    columns = [
        SheetColumn("ranks", [str(size.num_ranks) for size in sizes], is_text=True),
        SheetColumn("tokens, x the mean", [f"{size.busiest:.2f}" for size in sizes]),
        bytes_column("allocated", [size.peak_allocated_bytes for size in sizes]),
    ]
    remark = "the weights of experts stay those of the recorded rank; fewer ranks hold more of them"
    return Sheet("The busiest rank by expert parallel size", columns, [remark])


def ranks_report(playable: Playable, load: str, table: pd.DataFrame) -> Report:
    """One draw on each rank, most tokens first."""
    rows = table.sort_values(["tokens", "rank"], ascending=[False, True], kind="stable")
    columns = [
        SheetColumn("rank", rows["rank"].astype(str).to_list(), is_text=True),
        SheetColumn("tokens", [f"{tokens:,}" for tokens in rows["tokens"]]),
        SheetColumn("x the mean", [f"{share:.2f}" for share in rows["share"]]),
        bytes_column("allocated", rows["peak_allocated_bytes"].to_list()),
        bytes_column("reserved", rows["peak_reserved_bytes"].to_list()),
        SheetColumn("", ["" if fits else "out of memory" for fits in rows["fits"]], is_text=True),
    ]
    remarks = [
        f"PyTorch has {format_bytes(playable.room_bytes)}: {int((~rows['fits']).sum())} of {len(rows)} ranks lack it",
        f"played from the recording of rank {playable.job.rank}: weights and optimizer state are its own",
    ]
    if (step_us := float(rows["step_us"].iloc[0])) == step_us:
        remarks.append(f"all wait for the busiest rank of each call: the step takes {format_us(step_us)}")
    title = f"Memory simulated: each rank by {load}, seed {int(rows['seed'].iloc[0])}"

    def data() -> dict[str, object]:
        about = {"run_directory": str(playable.run.path), "router_load": load, "room_bytes": playable.room_bytes}
        return {**about, "ranks": _rows(table)}

    return Report("play", [Sheet(title, columns, remarks)], data, lambda: table)


def _play_object(played: Played) -> dict[str, object]:
    part, low, high = played.without_memory
    return {
        "run_directory": str(played.playable.run.path),
        "router_load": played.load,
        "groups": [list(ranks) for ranks in played.playable.groups],
        "room_bytes": played.playable.room_bytes,
        "num_blocks": len(played.playable.program.base),
        "num_following": played.num_following,
        "num_bounded": len(played.playable.program.bounded),
        "out_of_memory": {"part": part, "low": low, "high": high},
        "even": {"peak_allocated_bytes": played.even_peak_bytes, "step_us": _known(played.even_step_us)},
        "remedies": [to_plain(remedy) for remedy in played.remedies],
        "sizes": [to_plain(size) for size in played.sizes],
        "draws": _rows(played.draws),
    }


def _rows(table: pd.DataFrame) -> list[dict[str, object]]:
    return [{str(name): _known(value) for name, value in row.items()} for row in table.to_dict(orient="records")]


def _known(value: object) -> object:
    return None if isinstance(value, float) and np.isnan(value) else value
