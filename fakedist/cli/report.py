"""``fakedist report``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.say import print_report


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--all-layers", is_flag=True, help="Do not fold repeated layers.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write one page instead.")
def report(run: Path, as_json: bool, all_layers: bool, html: Path | None) -> int:
    """Show the tables of a run again; needs no torch."""
    if html is not None:
        from fakedist.report.html import write_page
        from fakedist.report.run import Run

        write_page(Run(run), html)
        click.echo(str(html))
        return 0
    print_report(run, as_json, all_layers)
    return 0
