"""``fakedist check``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import click

from fakedist.cli.job_options import GroupedCommand, executor_options
from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    chosen_output,
    file_option,
    format_options,
    last_line,
    remark,
    removed_option,
    say,
)
from fakedist.errors import ExitCode, ScriptError
from fakedist.temporary import scratch_directory
from fakedist.visible import visible_lines

if TYPE_CHECKING:
    from fakedist.check.checking import Checked
    from fakedist.check.running import RankToRun

_FILE = click.Path(path_type=Path, dir_okay=False)
_DIRECTORY = click.Path(path_type=Path, file_okay=False)


class _CheckCommand(GroupedCommand):
    headings: ClassVar[Mapping[str, str]] = dict.fromkeys(("config", "update"), "Check")


@click.command(cls=_CheckCommand)
@click.argument("names", nargs=-1, metavar="[JOB]...")
@click.option(
    "--config",
    type=_FILE,
    metavar="FILE",
    help="Where the jobs are.  [default: fakedist.toml or pyproject.toml, here or above]",
)
@click.option("--update", is_flag=True, help="Write baselines from these runs, for you to commit.")
@executor_options
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML)
@click.option("--junit", type=_FILE, metavar="FILE", help="Also write JUnit XML.")
@removed_option("--sarif", "--sarif was removed: --junit FILE and --annotations have the same lines; leave it out")
@click.option(
    "--annotations/--no-annotations",
    default=None,
    help="Also print GitHub annotations.  [default: if GITHUB_ACTIONS is true]",
)
@click.option("--runs", type=_DIRECTORY, metavar="DIR", help="Keep the run directories here.")
@click.option(
    "--against",
    type=_DIRECTORY,
    metavar="DIR",
    help="Also show what changed since the check that kept its run directories there.",
)
def check(
    names: tuple[str, ...],
    *,
    config: Path | None,
    update: bool,
    file: Path | None,
    form: str | None,
    as_json: bool,
    junit: Path | None,
    annotations: bool | None,
    runs: Path | None,
    against: Path | None,
    on: str,
    jobs: int | None,
    cold: bool,
) -> int:
    """Run the jobs of [tool.fakedist.check] against their budgets.

    The exit code is 3 if a budget is exceeded or a job grew more than its baseline allows, 4 if a rank does not fit
    its GPU, 1 if a script fails, and 2 if the configuration is invalid.
    """
    from fakedist.check.checking import Running
    from fakedist.check.checking import check as run_check
    from fakedist.check.config import find_config, read_config
    from fakedist.check.outputs import check_report, junit_text
    from fakedist.launcher.executors.choosing import make_executor
    from fakedist.report.writing import replace_text, see_that_it_can_be_written

    output = chosen_output(form, as_json, file)
    is_printed = output.format != TEXT and file is None
    if annotations and is_printed:
        raise click.UsageError(f"--annotations and --format {output.format} are both printed: give -o FILE")
    configured = read_config(config or find_config(Path.cwd())).chosen(names)
    if junit is not None:
        see_that_it_can_be_written(junit)
    if runs is not None:
        see_that_it_can_be_written(runs, is_directory=True)
    with scratch_directory("check") as scratch:
        try:
            executor = make_executor(on, jobs, remark, cold=cold)
            running = Running(runs or scratch, executor, _say_finished, against=against)
            checked = run_check(configured, running, update=update)
        except ScriptError as error:
            click.echo(error.output, err=True)
            return last_line(ExitCode.ERROR, error.message)
    output.write(check_report(checked))
    if junit is not None:
        junit.parent.mkdir(parents=True, exist_ok=True)
        replace_text(junit, junit_text(checked))
    if annotations is None:
        annotations = os.environ.get("GITHUB_ACTIONS") == "true" and not is_printed
    if annotations:
        _annotate(checked)
    if output.format != TEXT or output.file is not None:  # what failed the build is in its log, too
        for line in (*(finding.message for finding in checked.exceeded), *checked.problems):
            say(line, err=True)
        for failure in checked.failures:
            click.echo(f"---- {visible_lines(failure.message)}\n{failure.output}", err=True)
    return _say_outcome(checked, update)


def _say_finished(rank: RankToRun, seconds: float) -> None:
    say(f"{rank.name}: ran in {seconds:.0f} s", err=True)


def _annotate(checked: Checked) -> None:
    from fakedist.check.outputs import github_annotations

    sys.stdout.flush()
    for line in github_annotations(checked):
        say(line)


def _say_outcome(checked: Checked, update: bool) -> int:
    for failure in checked.failures:
        say(f"---- {failure.message.partition(':')[0]}, to run it again: {failure.hint}", err=True)
    if update and checked.exit_code == 0 and not checked.updated:
        click.echo("the baselines did not change", err=True)
    if not checked.exit_code:
        return 0
    from fakedist.check.outputs import outcome

    return last_line(checked.exit_code, outcome(checked) + ("; no baseline was written" if update else ""))
