"""``fakedist compare``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fakedist.cli.say import console


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Markdown, for a review.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write one page instead.")
@click.option("--all", "all_rows", is_flag=True, help="Show small changes too.")
def compare(a: Path, b: Path, all_rows: bool, html: Path | None, **formats: bool) -> int:
    """Say what changed from run A to run B, and why.

    A and B are run directories: of two commits, two ranks, two layouts, two GPUs, two versions of torch.
    """
    if sum((*formats.values(), html is not None)) > 1:
        raise click.UsageError("--json, --markdown and --html exclude each other")
    from fakedist.report.compare.change_sheets import comparison_markdown, render_comparison
    from fakedist.report.compare.comparison import Comparison, comparison_object

    comparison = Comparison(a, b)
    if html is not None:
        from fakedist.report.compare.comparison_page import write_comparison_page

        write_comparison_page(comparison, html)
        click.echo(str(html))
    elif formats["as_json"]:
        click.echo(json.dumps(comparison_object(comparison), indent=2))
    elif formats["as_markdown"]:
        click.echo(comparison_markdown(comparison, all_rows=all_rows), nl=False)
    else:
        render_comparison(comparison, all_rows=all_rows, console=console())
    return 0
