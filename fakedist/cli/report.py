"""``fakedist report``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.say import print_report


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--all-layers", is_flag=True, help="Do not fold repeated layers.")
def report(run: Path, as_json: bool, all_layers: bool) -> int:
    """Show the tables of a run again; needs no torch."""
    print_report(run, as_json, all_layers)
    return 0
