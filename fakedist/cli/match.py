"""``fakedist match``."""

from __future__ import annotations

from pathlib import Path

import click

from fakedist.cli.output import (
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    RunPath,
    chosen_output,
    file_option,
    format_options,
    last_line,
    reading,
)
from fakedist.errors import ExitCode


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@file_option
@format_options(TEXT, JSON, MARKDOWN, HTML)
def match(runs: tuple[Path, ...], *, file: Path | None, form: str | None, as_json: bool) -> int:
    """Show whether the calls of a job's ranks match.

    RUN is a directory of several ranks' runs, or the run of one. Every rank of a group has to make its collectives
    in the same order, with the same operation, dtype, bytes, reduction and root, and every send needs a receive;
    otherwise the job hangs or computes wrong values. The calls are played against each other by the rules of NCCL and
    torch.distributed. Ranks without a run are copies of a rank of their kind, or are assumed to match. If the calls do
    not match, the exit code is 5. RUN may also be the dumps that torch's Flight Recorder wrote of a job that hung, one
    file a rank, or their directory. The script does not run, and this needs no torch (docs/match.md).
    """
    from fakedist.report.content.match import match_report, verdict
    from fakedist.results.job_ranks import match_dumps, match_runs
    from fakedist.traces.flight_recorder import dumps_among

    output = chosen_output(form, as_json, file)
    with reading(*runs):
        dumps = dumps_among(runs)
        found = match_dumps(dumps) if dumps else match_runs(runs)
        output.write(match_report(found))
    return ExitCode.DONE if found.matched.is_matched else last_line(ExitCode.MISMATCH, verdict(found))
