"""``fakedist play``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.output import (
    CSV,
    JSON,
    MARKDOWN,
    TEXT,
    Output,
    RunPath,
    chosen_output,
    file_option,
    format_options,
    reading,
)
from fakedist.options.expert_loads import parse_router_load

if TYPE_CHECKING:
    from fakedist.extras.play.long_runs import PlayableSteps, PlayedSteps
    from fakedist.extras.play.router_draws import Playable, Played
    from fakedist.report.content.report_blocks import Report


@click.command()
@click.argument("run", type=RunPath())
@click.option("--router-load", "load", metavar="LOAD", help="The load to draw.  [default: the run's]")
@click.option("--draws", type=click.IntRange(min=1), metavar="N", help="How many to draw.  [default: 1000]")
@click.option("--seed", type=int, metavar="N", help="Seed of the first draw.  [default: 0; with --ranks the run's]")
@click.option("--ranks", is_flag=True, help="Play one draw on each rank, instead of the hottest rank in each draw.")
@click.option(
    "--change",
    "changes",
    type=click.Path(path_type=Path),
    metavar="RUN",
    multiple=True,
    help="The same rank recorded with a change, such as recomputation: played with the draws that need most.",
)
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Play so many steps of RUN, instead of draws of loads."
)
@click.option(
    "--lengths",
    metavar="LENGTHS",
    help="With --steps: lengths of a sample, lognormal:MEAN,SIGMA,MAX or a file of one a line.  [default: the run's]",
)
@click.option(
    "--every",
    metavar="NAME=N",
    multiple=True,
    help="With --steps: run step NAME, such as evaluation, every N steps.  [default: as recorded]",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --steps: random sequences of lengths.  [default: 20]",
)
@file_option
@format_options(TEXT, JSON, MARKDOWN, CSV)
def play(
    run: Path,
    *,
    load: str | None,
    draws: int | None,
    seed: int | None,
    ranks: bool,
    changes: tuple[Path, ...],
    steps: int | None,
    lengths: str | None,
    every: tuple[str, ...],
    seeds: int | None,
    file: Path | None,
    form: str | None,
    as_json: bool,
) -> int:
    """Play loads of experts, or many steps: is memory too small?

    RUN is a run on the virtual GPU with --router-load. Each draw gives experts other numbers of tokens. Of the ranks
    of the run's pipeline stage, the one that receives most is played: the run's allocations, with the sizes that follow
    from its tokens, in its order, through PyTorch's caching allocator. The script does not run. The time of the step is
    priced again.

    With --steps, RUN is any run on the virtual GPU, of steps of different lengths: they are played one after the other.
    """
    output = chosen_output(form, as_json, file)
    if steps is not None:
        if load is not None or draws is not None or ranks or changes:
            raise click.UsageError("--steps plays no loads: leave out --router-load, --draws, --ranks and --change")
        _write_steps(run, output, lengths, (steps, every), range(seed or 0, (seed or 0) + (seeds or 20)))
        return 0
    if lengths is not None or every or seeds is not None:
        raise click.UsageError("--lengths, --every and --seeds need --steps")
    from fakedist.extras.play.play_report import play_report
    from fakedist.extras.play.router_draws import open_playable

    with reading(run):
        playable = open_playable(run)
        load = playable.facts.load if load is None else parse_router_load(load)
        if ranks:
            if changes:
                raise click.UsageError("--ranks takes no --change")
            seed = playable.job.seed if seed is None else seed
            output.write(_ranks_report(playable, load, seed))
            return 0
        seed = seed or 0
        output.write(play_report(_played(playable, load, range(seed, seed + (draws or 1000)), changes)))
    return 0


def _write_steps(
    run: Path, output: Output, lengths: str | None, steps: tuple[int, Sequence[str]], seeds: range
) -> None:
    from fakedist.extras.play.long_runs import open_playable_steps
    from fakedist.extras.play.play_report import long_run_report

    with reading(run):
        output.write(long_run_report(_played_steps(open_playable_steps(run), lengths, steps, seeds)))


def _played_steps(
    playable: PlayableSteps, lengths: str | None, steps: tuple[int, Sequence[str]], seeds: range
) -> PlayedSteps:
    from fakedist.extras.play.long_runs import checked_player, name_sequence, parse_every, play_long

    num_steps, every = steps
    names = name_sequence(playable.names, parse_every(every, playable.names), num_steps)
    with checked_player(playable, num_steps) as play:
        return play_long(playable, lengths, names, seeds, play)


def _played(playable: Playable, load: str, seeds: range, changes: tuple[Path, ...]) -> Played:
    from fakedist.extras.play.router_draws import open_playable, play_draws
    from fakedist.temporary import scratch_directory

    with scratch_directory("play") as folder:
        changed = [open_playable(path) for path in changes]
        players = [one.player(folder / f"{number}.npz") for number, one in enumerate([playable, *changed])]
        return play_draws(playable, load, seeds, players[0], list(zip(changed, players[1:], strict=True)))


def _ranks_report(playable: Playable, load: str, seed: int) -> Report:
    from fakedist.extras.play.play_report import ranks_report
    from fakedist.extras.play.router_draws import play_ranks
    from fakedist.temporary import scratch_directory

    with scratch_directory("play") as folder:
        table = play_ranks(playable, load, seed, playable.player(folder / "program.npz"))
    return ranks_report(playable, load, table)


COMMAND = play
