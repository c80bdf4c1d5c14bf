"""``fakedist play``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.output import CSV, HTML, JSON, MARKDOWN, TEXT, chosen_output, file_option, format_options
from fakedist.cli.say import reading
from fakedist.options.expert_loads import parse_router_load

if TYPE_CHECKING:
    from fakedist.results.router_draws import Playable, Played


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--router-load", "load", metavar="LOAD", help="The load to draw.  [default: the run's]")
@click.option(
    "--draws", type=click.IntRange(min=1), metavar="N", default=1000, show_default=True, help="How many to draw."
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Seed of the first draw.")
@file_option
@format_options(TEXT, JSON, MARKDOWN, CSV, HTML)
def play(
    run: Path,
    *,
    load: str | None,
    draws: int,
    seed: int,
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
        played = _played(playable, load, range(seed, seed + draws))
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


def _played(playable: Playable, load: str, seeds: range) -> Played:
    from fakedist.launcher.playing import play as play_program
    from fakedist.results.router_draws import play_draws
    from fakedist.temporary import scratch_directory

    with scratch_directory("play") as folder:
        program = folder / "program.npz"
        playable.write(program)
        return play_draws(playable, load, seeds, lambda counts: play_program(program, counts, playable.alloc_conf))
