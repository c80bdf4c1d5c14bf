"""``fakedist profile``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.job_options import ScriptCommand, cold_option, ignored, job_options, jobs_of
from fakedist.cli.output import (
    JSON,
    MARKDOWN,
    TEXT,
    Output,
    all_rows_option,
    chosen_output,
    format_options,
    length_options,
    print_report,
    remark,
    run_directory_options,
    say,
    say_ending,
    say_first_failure,
)
from fakedist.options import Job
from fakedist.options.expert_loads import EVEN
from fakedist.rundir.directory import PAGE_NAME, default_name, remove_if_empty, remove_run

if TYPE_CHECKING:
    from fakedist.launcher.launching import Streams
    from fakedist.launcher.ranks import RankRun
    from fakedist.report.content.report_blocks import Report
    from fakedist.rundir.outcome import Ending

STDERR = 2  # the descriptor
#: Values of --rank for all ranks, and for one of each pipeline stage.
_ALL, _STAGES = "all", "stages"
#: The value of --rank for ranks of each kind.
_DISTINCT = "distinct"
#: How many ranks a word runs at most.
_MOST_SEVERAL = 128
#: Values of --rank for the rank that gets the most tokens for its experts, and others: their place among all.
_BY_LOAD = {"hottest": 0.0, "median": 0.5, "coldest": 1.0}

_RANKS = (
    "The rank to run, or several: 0,4,8 or 0-1023:64; or all; or stages: one rank of each pipeline stage; or distinct: "
    "the first and the last rank of each kind (docs/match.md); or hottest, median or coldest: by the tokens that "
    "--router-load sends to a rank's experts."
)


@click.command(cls=ScriptCommand, no_args_is_help=True, params=job_options(rank_help=_RANKS))
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="How many of several ranks run at once.",
)
@cold_option
@run_directory_options
@format_options(TEXT, JSON, MARKDOWN)
@all_rows_option()
@length_options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    *,
    arguments: tuple[str, ...],
    module: str | None,
    directory: Path | None,
    force: bool,
    form: str | None,
    as_json: bool,
    all_rows: bool,
    full: bool,
    section: str | None,
    jobs: int,
    cold: bool,
    **values: object,
) -> int:
    """Run one rank of a job and report its memory and time.

    SCRIPT and everything after it are what you would give to torchrun. The script's output goes to stderr unless the
    format is text. torchrun's --standalone, --node-rank, --master-addr, --master-port and --rdzv-* are ignored.

    Several ranks run one after the other, or with --jobs side by side. Each receives what those before it in the list
    sent (docs/tape.md). --rank stages finds the pipeline among rank 0's groups, and runs a rank of each stage; the step
    of the whole job follows (docs/time.md). --rank distinct runs the first and the last rank of each kind
    (docs/match.md). --rank hottest runs rank 0, then the rank of its stage whose experts get the most tokens.
    """
    from fakedist.launcher import launching

    output = chosen_output(form, as_json)
    word = values["rank"][0] if isinstance(values["rank"], tuple) and len(values["rank"]) == 1 else ""
    is_whole = word in (_STAGES, _DISTINCT)
    asked = _asked(word, arguments, module, values)
    if is_whole and asked[0].with_peers:
        raise click.UsageError(f"--with-peers is for one rank, and --rank {word} runs several")
    if (is_whole or len(asked) > 1) and output.format == MARKDOWN:
        number = f"{word}{' ranks' * (word == _DISTINCT)} were asked for" if is_whole else f"{len(asked)} were given"
        raise click.UsageError(f"--format {MARKDOWN} is for one rank, and {number}")
    say_ignored(ctx)
    launching.check(asked[0])
    streams = launching.Streams(
        child_stdout=STDERR if output.format != TEXT else None,
        progress=sys.stderr if sys.stderr.isatty() else None,
        say=remark,
    )
    if is_whole:
        return _whole_job(
            asked[0], word, streams, directory=directory, force=force, output=output, jobs=jobs, cold=cold
        )
    if len(asked) > 1 or word in _BY_LOAD:
        more = _ranks_by_load(asked[0], word) if word in _BY_LOAD else None
        return _several(asked, streams, more, directory=directory, force=force, output=output, jobs=jobs, cold=cold)
    run_directory, ending = run_one(asked[0], directory, force, streams)
    if ending.is_refusal:
        remove_run(run_directory)
    else:
        if output.format == TEXT:
            say("(Losses, times and rates that the script printed above are not the real job's.)\n")
        print_report(run_directory, output, all_layers=all_rows, full=full, section=section)
    return say_ending(ending, asked[0], run_directory)


def _asked(word: str, arguments: tuple[str, ...], module: str | None, values: Mapping[str, object]) -> tuple[Job, ...]:
    """The jobs of the ranks that are given, or of rank 0 for a word that is to find them."""
    is_word = word in (_ALL, _STAGES, _DISTINCT, *_BY_LOAD)
    asked = jobs_of(arguments, module, {**values, "rank": ("0",)} if is_word else values)
    if word in _BY_LOAD and asked[0].router_load == EVEN:
        raise click.UsageError(f"--rank {word} needs --router-load: an even load sends every rank the same tokens")
    if word != _ALL:
        return asked
    job = asked[0]
    if job.world_size > _MOST_SEVERAL:
        raise click.UsageError(
            f"--rank all would run {job.world_size:,} ranks: --rank distinct runs those of each kind, "
            f"--rank 0-{job.world_size - 1} runs all"
        )
    return tuple(replace(job, rank=rank) for rank in range(job.world_size))


def say_ignored(ctx: click.Context) -> None:
    """Print which of torchrun's options have no effect."""
    if flags := ignored(ctx):
        remark(f"ignored, because only torchrun needs {'it' if len(flags) == 1 else 'them'}: {', '.join(flags)}")


def run_one(job: Job, directory: Path | None, force: bool, streams: Streams) -> tuple[Path, Ending]:
    """Run one rank, with the peers that it waits for if the job asks for them. Returns its run and how it ended."""
    from fakedist.launcher import launching
    from fakedist.launcher.ranks import profile_with_peers

    if not job.with_peers:
        return launching.profile(job, directory, force, streams)
    return profile_with_peers(job, directory, force, streams)


def _several(
    asked: Sequence[Job],
    streams: Streams,
    more: Callable[[Sequence[RankRun]], Sequence[int]] | None,
    *,
    directory: Path | None,
    force: bool,
    output: Output,
    jobs: int,
    cold: bool,
) -> int:
    from fakedist.launcher.ranks import profile_ranks

    job, ranks = asked[0], [job.rank for job in asked]
    directory = directory or default_name(job, ranks)
    finished = profile_ranks(job, ranks, directory, force, streams, more=more, jobs=jobs, cold=cold)
    runs = sorted(finished, key=lambda run: ranks.index(run.rank) if run.rank in ranks else len(ranks))
    _show_ranks(runs, job, directory, output)
    return say_first_failure(runs, job)


def _show_ranks(runs: Sequence[RankRun], job: Job, directory: Path, output: Output, *, has_kinds: bool = False) -> None:
    """Print the report of several ranks, and write their page."""
    from fakedist.report.content.job import RankRow, job_report
    from fakedist.results.job_time import open_job_runs

    if runs and all(run.ending.is_refusal for run in runs):
        for run in runs:
            if run.run_directory is not None:
                remove_run(run.run_directory)
        remove_if_empty(directory)
        return
    rows = [RankRow(run.rank, run.run_directory, run.ending, run.wall_s) for run in runs]
    ran = [row.rank for row in rows if row.run_directory is not None]
    found = open_job_runs(directory, ran) if ran else None
    report = job_report(rows, job.world_size, found, folder=directory, has_kinds=has_kinds)
    output.write(report)
    if job.page and ran:
        _write_page(report, directory)


def _ranks_by_load(job: Job, word: str) -> Callable[[Sequence[RankRun]], Sequence[int]]:
    """Return what chooses the rank to run after the first one by what that one's run says of all of its group."""

    def chosen(runs: Sequence[RankRun]) -> Sequence[int]:
        from fakedist.errors import JobError
        from fakedist.results.job_ranks import ranks_by_load

        run = runs[0]
        if len(runs) > 1:
            return ()
        ranks = [] if run.run_directory is None else ranks_by_load(run.run_directory)
        if not ranks:
            raise JobError(
                f"rank {job.rank} was not seen to exchange tokens for experts that --router-load chose, so none is the "
                f"{word}",
                "name the ranks to run: --rank 0,1",
            )
        rank, share = ranks[round(_BY_LOAD[word] * (len(ranks) - 1))]
        remark(f"the {word} of {len(ranks)} ranks: rank {rank}, whose experts get {share:.2f} x the mean")
        return () if rank == run.rank else (rank,)

    return chosen


def _write_page(report: Report, directory: Path) -> None:
    """Write the page of several ranks into their directory, and print its path."""
    from fakedist.errors import FakedistError
    from fakedist.report.render.html import report_page
    from fakedist.report.writing import may_hold_page, replace_text

    path = directory / PAGE_NAME
    if not may_hold_page(path):
        remark(f"no page of these ranks: {path} is not fakedist's")
        return
    try:
        replace_text(path, report_page(report))
    except FakedistError as error:
        remark(f"no page of these ranks: {error.message}")
        return
    remark(f"the page of these ranks: {path}")


def _whole_job(
    job: Job, word: str, streams: Streams, *, directory: Path | None, force: bool, output: Output, jobs: int, cold: bool
) -> int:
    """Run a rank of each stage or kind."""
    from fakedist.launcher.ranks import profile_ranks

    directory = directory or default_name(job, which=word)
    more = _other_stages if word == _STAGES else _distinct_ranks()
    runs = list(profile_ranks(job, (job.rank,), directory, force, streams, more=more, jobs=jobs, cold=cold))
    _show_ranks(runs, job, directory, output, has_kinds=word == _DISTINCT)
    return say_first_failure(runs, job)


def _other_stages(runs: Sequence[RankRun]) -> Sequence[int]:
    from fakedist.results.job_time import stages_of_job

    if len(runs) > 1 or runs[0].run_directory is None:
        return ()
    pipeline = stages_of_job(runs[0].run_directory)
    remark(f"pipeline of {len(pipeline.ranks)} stages: group {pipeline.group}, as {pipeline.why}")
    return pipeline.ranks


def _distinct_ranks() -> Callable[[Sequence[RankRun]], Sequence[int]]:
    """Return what chooses the ranks to run next, so that each kind of rank is checked by the runs of two."""
    from fakedist.results.job_ranks import KindSearch

    search = KindSearch()

    def chosen(runs: Sequence[RankRun]) -> Sequence[int]:
        for run in runs[search.num_runs :]:
            if run.run_directory is None or run.ending.failed:
                return ()
            search.add(run.run_directory)
        found = search.found()
        if found is None:
            remark("ranks make groups that others do not, so which are alike cannot be told: name the ranks to run")
            return ()
        checked = sum(kind.is_checked for kind in found.kinds)
        wanted = [rank for rank in found.wanted if rank not in search.ranks][: _MOST_SEVERAL - len(runs)]
        remark(
            f"{checked} of {len(found.kinds)} kinds of ranks are checked by {len(runs)} ranks; {len(wanted)} run next"
        )
        return wanted

    return chosen
