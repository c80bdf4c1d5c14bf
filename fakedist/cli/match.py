"""``fakedist match``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import JSON, MARKDOWN, TEXT, chosen_output, file_option, format_options
from fakedist.cli.say import last_line, reading
from fakedist.errors import ExitCode


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@file_option
@format_options(TEXT, JSON, MARKDOWN)
def match(runs: tuple[Path, ...], *, file: Path | None, form: str | None, as_json: bool) -> int:
    """Show whether the calls of a job's ranks match.

    RUN is a directory of several ranks' runs, or the run of one. On every group, the calls of all of its ranks have
    to agree in order, operation, dtype, bytes, reduction and root, and sends have to meet receives; else the job
    hangs or computes wrong values. They are played against each other by NCCL's rules; ranks without a run are
    assumed to agree. If they do not match, the exit code is 5. The script does not run, and this needs no torch
    (docs/match.md).
    """
    from fakedist.report.text import match_sheets
    from fakedist.results.matched import match_runs

    output = chosen_output(form, as_json, file)
    with reading(*runs):
        found = match_runs(runs)
        if output.format == JSON:
            output.write_object(match_sheets.match_object(found))
        elif output.format == MARKDOWN:
            output.write(match_sheets.match_markdown(found))
        else:
            output.render(lambda console: match_sheets.render_match(found, console))
    if found.matched.is_matched:
        return ExitCode.DONE
    return last_line(ExitCode.MISMATCH, match_sheets.verdict(found))
