"""``fakedist play``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.output import CSV, HTML, JSON, MARKDOWN, TEXT, chosen_output, file_option, format_options
from fakedist.cli.say import reading
from fakedist.options.expert_loads import parse_router_load

if TYPE_CHECKING:
    from fakedist.cli.output import Output
    from fakedist.results.router_draws import Playable, PlayCounts, Played


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--router-load", "load", metavar="LOAD", help="The load to draw.  [default: the run's]")
@click.option(
    "--draws", type=click.IntRange(min=1), metavar="N", default=1000, show_default=True, help="How many to draw."
)
@click.option("--seed", type=int, metavar="N", help="Seed of the first draw.  [default: 0; with --ranks the run's]")
@click.option("--ranks", is_flag=True, help="Play one draw on each rank, instead of the hottest rank in each draw.")
@click.option(
    "--change",
    "changes",
    type=click.Path(path_type=Path),
    metavar="RUN",
    multiple=True,
    help="The same rank recorded with a change, such as recomputation: is it enough for the draws that need most?",
)
@file_option
@format_options(TEXT, JSON, MARKDOWN, CSV, HTML)
def play(
    run: Path,
    *,
    load: str | None,
    draws: int,
    seed: int | None,
    ranks: bool,
    changes: tuple[Path, ...],
    file: Path | None,
    form: str | None,
    as_json: bool,
) -> int:
    """Draw loads of experts: how often is memory too small?

    RUN is a run on the virtual GPU with --router-load. Each draw gives experts other numbers of tokens. Of the ranks
    of the run's pipeline stage, the one that receives most is played: the run's allocations, with the sizes that follow
    from its tokens, in its order, through PyTorch's caching allocator. The script does not run. The time of the step is
    priced again.
    """
    from fakedist.report.text import play_sheets
    from fakedist.results.router_draws import open_playable

    output = chosen_output(form, as_json, file)
    with reading(run):
        playable = open_playable(run)
        load = playable.facts.load if load is None else parse_router_load(load)
        if ranks:
            if changes or output.format == HTML:
                raise click.UsageError("--ranks takes no --change, and --format text, json, markdown or csv")
            _write_ranks(output, playable, load, playable.job.seed if seed is None else seed)
            return 0
        seed = seed or 0
        played = _played(playable, load, range(seed, seed + draws), changes)
        if output.format == JSON:
            output.write_object(play_sheets.play_object(played))
        elif output.format == MARKDOWN:
            output.write(play_sheets.play_markdown(played))
        elif output.format == CSV:
            output.write(played.draws.to_csv(index=False))
        elif output.format == HTML:
            from fakedist.report.page.play_page import play_page

            output.write(play_page(played))
        else:
            output.render(lambda console: play_sheets.render_play(played, console))
    return 0


def _played(playable: Playable, load: str, seeds: range, changes: tuple[Path, ...]) -> Played:
    from fakedist.results.router_draws import open_playable, play_draws
    from fakedist.temporary import scratch_directory

    with scratch_directory("play") as folder:
        changed = [open_playable(path) for path in changes]
        players = [_player(one, folder / f"{number}.npz") for number, one in enumerate([playable, *changed])]
        return play_draws(playable, load, seeds, players[0], list(zip(changed, players[1:], strict=True)))


def _player(playable: Playable, program: Path) -> PlayCounts:
    from fakedist.launcher.playing import play as play_program

    playable.write(program)
    return lambda counts: play_program(program, counts, playable.alloc_conf)


def _write_ranks(output: Output, playable: Playable, load: str, seed: int) -> None:
    from fakedist.report.text import play_sheets
    from fakedist.results.router_draws import play_ranks
    from fakedist.temporary import scratch_directory

    with scratch_directory("play") as folder:
        table = play_ranks(playable, load, seed, _player(playable, folder / "program.npz"))
    if output.format == JSON:
        output.write_object(play_sheets.ranks_object(playable, load, table))
    elif output.format == MARKDOWN:
        output.write(play_sheets.ranks_markdown(playable, load, table))
    elif output.format == CSV:
        output.write(table.to_csv(index=False))
    else:
        output.render(lambda console: play_sheets.render_ranks(playable, load, table, console))
