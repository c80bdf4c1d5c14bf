"""``fakedist report``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.say import print_report


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown", "csv"]),
    default="text",
    show_default=True,
    help="Markdown fits a comment on a pull request; csv is one table.",
)
@click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write one page instead.")
@click.option("--table", default="layers", show_default=True, metavar="NAME", help="Which table --format csv prints.")
@click.option("--all-layers", is_flag=True, help="Do not fold repeated layers.")
def report(run: Path, form: str, as_json: bool, html: Path | None, **options: object) -> int:
    """Show a run again; needs no torch.

    RUN is what fakedist profile made, or a file that torch.cuda.memory._dump_snapshot() wrote.
    """
    all_layers = bool(options["all_layers"])
    if as_json and form not in ("text", "json"):
        raise click.UsageError(f"--json and --format {form} exclude each other")
    if html is not None:
        from fakedist.report.page.run_page import write_page
        from fakedist.results.opening import open_run

        write_page(open_run(run), html)
        click.echo(str(html))
    elif form == "markdown":
        from fakedist.report.text.run_markdown import run_markdown
        from fakedist.results.opening import open_run

        click.echo(run_markdown(open_run(run), all_layers=all_layers), nl=False)
    elif form == "csv":
        from fakedist.report.text.csv_table import table_csv
        from fakedist.results.opening import open_run

        click.echo(table_csv(open_run(run), str(options["table"]), all_layers=all_layers), nl=False)
    else:
        print_report(run, as_json or form == "json", all_layers)
    return 0
