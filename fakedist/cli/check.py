"""``fakedist check``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fakedist.cli.say import console, last_line
from fakedist.errors import ExitCode, ScriptError

if TYPE_CHECKING:
    from fakedist.check.checking import Checked
    from fakedist.check.running import Task

_FILE = click.Path(path_type=Path, dir_okay=False)
_DIRECTORY = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("names", nargs=-1, metavar="[JOB]...")
@click.option("--config", type=_FILE, metavar="FILE", help="[default: fakedist.toml or pyproject.toml, here or above]")
@click.option("--update", is_flag=True, help="Write baselines from what ran, to be committed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--junit", type=_FILE, metavar="FILE", help="Write JUnit XML too.")
@click.option("--markdown", type=_FILE, metavar="FILE", help="Write Markdown too: $GITHUB_STEP_SUMMARY.")
@click.option("--sarif", type=_FILE, metavar="FILE", help="Write SARIF 2.1.0 too, for code scanning.")
@click.option(
    "--annotations/--no-annotations",
    default=None,
    help="Print GitHub annotations.  [default: where GITHUB_ACTIONS is true]",
)
@click.option(
    "--runs", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Keep the run directories."
)
@click.option("--at-once", type=click.IntRange(min=1), metavar="N", help="Jobs at once.  [default: what fits]")
def check(names: tuple[str, ...], update: bool, as_json: bool, **options: Any) -> int:
    """Run the jobs of [tool.fakedist.check] and see that none takes more than it may.

    Exits with 3 if a budget is exceeded or a job grew more than its baseline allows, 4 if a rank does not fit its
    GPU, 1 if a script fails, 2 if the configuration makes no sense.
    """
    from fakedist.check.checking import Running
    from fakedist.check.checking import check as run_check
    from fakedist.check.config import find_config, read_config
    from fakedist.report.writing import see_that_it_can_be_written

    config = read_config(options["config"] or find_config(Path.cwd())).chosen(names)
    for name in ("junit", "markdown", "sarif"):
        if options[name] is not None:
            see_that_it_can_be_written(options[name])
    if options["runs"] is not None:
        see_that_it_can_be_written(options["runs"], is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fakedist-check-") as scratch:
        running = Running(options["runs"] or Path(scratch), options["at_once"], _say_finished)
        try:
            checked = run_check(config, running, update=update)
        except ScriptError as error:
            click.echo(error.output, err=True)
            return last_line(ExitCode.ERROR, error.message)
    if as_json:
        from fakedist.check.findings import checked_object

        click.echo(json.dumps(checked_object(checked), indent=2))
    else:
        _print(checked, options["annotations"])
    _write_files(checked, options)
    return _say_outcome(checked, update)


def _say_finished(task: Task, seconds: float) -> None:
    click.echo(f"{task.name}: ran in {seconds:.0f} s", err=True)


def _print(checked: Checked, annotations: bool | None) -> None:
    from fakedist.check.annotations import github_annotations
    from fakedist.check.findings import render_checked

    render_checked(checked, console())
    sys.stdout.flush()
    if annotations if annotations is not None else os.environ.get("GITHUB_ACTIONS") == "true":
        for line in github_annotations(checked):
            click.echo(line)


def _write_files(checked: Checked, options: dict[str, Any]) -> None:
    from fakedist.check.annotations import sarif_text
    from fakedist.check.findings import checked_markdown
    from fakedist.check.junit import junit_text
    from fakedist.report.writing import replace_text

    makers = {"junit": junit_text, "markdown": checked_markdown, "sarif": sarif_text}
    texts = {path: make(checked) for name, make in makers.items() if (path := options[name]) is not None}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


def _say_outcome(checked: Checked, update: bool) -> int:
    for failure in checked.failures:
        click.echo(f"---- {failure.message}", err=True)
        click.echo(failure.output, err=True)
        click.echo(f"---- again: {failure.hint}", err=True)
    if update and checked.exit_code == 0 and not checked.updated:
        click.echo("the baselines are what they were", err=True)
    if not checked.exit_code:
        return 0
    from fakedist.check.findings import outcome

    return last_line(checked.exit_code, outcome(checked) + (": no baseline was written" if update else ""))
