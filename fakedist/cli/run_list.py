"""``fakedist runs``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import JSON, MARKDOWN, TEXT, chosen_output, file_option, format_options


@click.command()
@click.option("--prune", "is_pruning", is_flag=True, help="List what --yes deletes, and why the rest stays.")
@click.option("--yes", "is_sure", is_flag=True, help="With --prune, delete.")
@file_option
@format_options(TEXT, JSON, MARKDOWN)
def runs(*, is_pruning: bool, is_sure: bool, file: Path | None, form: str | None, as_json: bool) -> int:
    """List the runs of this directory: age, job, verdict and size.

    Runs without -o go to .fakedist/ in the current directory, where commands take them by their names alone. Those in
    the current directory itself are listed too. --prune --yes deletes runs in .fakedist/: never one that -o named, that
    still runs, that is a link, or that holds a file of anyone else. Sweeps stay.
    """
    if is_sure and not is_pruning:
        raise click.UsageError("--yes is for --prune: fakedist runs --prune --yes")
    from fakedist.report.content.run_list import list_report, list_runs, newest_first
    from fakedist.rundir.directory import prune
    from fakedist.sweep.sweep_directory import list_sweeps

    output = chosen_output(form, as_json, file)
    found = newest_first([*list_runs(), *list_sweeps()])
    for run in found:
        if is_sure and not run.kept:
            prune(run.path)
    output.write(list_report(found, is_pruning=is_pruning, is_pruned=is_sure))
    return 0
