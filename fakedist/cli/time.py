"""``fakedist time``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import click

from fakedist import extras
from fakedist.cli.job_options import (
    GroupedCommand,
    as_click,
    count_options,
    counts_of,
    given,
    pricing_of,
    pricing_options,
)
from fakedist.cli.output import (
    CSV,
    HTML,
    JSON,
    MARKDOWN,
    TEXT,
    Output,
    RunPath,
    all_rows_option,
    chosen_output,
    file_option,
    format_options,
    reading,
)
from fakedist.options.kinds import OptionGroup
from fakedist.options.pricing import BUDGET_OPTIONS

if TYPE_CHECKING:
    from fakedist.options.pricing import PricingOptions
    from fakedist.report.content.report_blocks import Report
    from fakedist.results.job_time import JobTime
    from fakedist.results.run import Run

#: What ``--format csv`` shows unless ``--table`` names another table.
_DEFAULT_TABLE = "layer_times"
#: Options that extras add to the step of one run, and their headings.
_ADDED = {param: part.HEADING for part in extras.parts("time_options") for param in part.OPTIONS}
#: Options that take several values, for a table.
_AXES = ("gpu", "fabric")


class _TimeCommand(GroupedCommand):
    headings: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (str(param.name) for param in (*pricing_options(), *count_options())), OptionGroup.PRICING.value
        ),
        **{str(param.name): heading for param, heading in _ADDED.items()},
        **{option.name: option.group.value for option in BUDGET_OPTIONS},
        "what_ifs": OptionGroup.PRICING.value,
    }


@click.command(
    cls=_TimeCommand,
    params=[*pricing_options(_AXES), *count_options(), *map(as_click, BUDGET_OPTIONS), *_ADDED],
)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="CHANGE",
    help="Show what a change would give: merge=A,B, separate=A, bandwidth=2x, bandwidth=nvlink:2x, fabric=NAME, "
    "gpus-per-node=N, host=2x, overlap, no-overlap, no-host-waits, no-sync, no-sync=FILE:LINE, cuda-graphs=LAYERS, "
    "compile=LAYERS or foreach. Repeatable, each on its own; A+B is both at once.",
)
@file_option
@format_options(TEXT, JSON, MARKDOWN, CSV, HTML)
@click.option("--table", metavar="NAME", help=f"The table for --format csv.  [default: {_DEFAULT_TABLE}]")
@all_rows_option()
def time(
    runs: tuple[Path, ...],
    *,
    what_ifs: tuple[str, ...],
    file: Path | None,
    form: str | None,
    as_json: bool,
    table: str | None,
    all_rows: bool,
    **values: object,
) -> int:
    """Estimate the timed step of a run on another GPU or network.

    RUN is a run directory. The launches of a run on the virtual GPU are priced again, without running the script. Its
    memory does not change, and neither do the kernels that PyTorch chose for the run's own GPU. A run on a real GPU can
    be priced for another interconnect only.

    Several runs are ranks of one job, one from each pipeline stage. They are priced together, and each waits for what
    the others send. The result is the step of the whole job; --format html draws it.

    With several GPUs or fabrics, such as --gpu h100,b200 --fabric dgx-h100-ndr,p5-efa, the result is one table.

    With --tokens 2T --price 2.5, what training on so many tokens takes: GPU-hours, energy at most, and its cost.

    With --lengths LENGTHS --prompt-tokens N the rollout of the run's inference engine, or of another (--engine CONFIG
    --kv-tokens N), on these GPUs is simulated, too.
    """
    output = chosen_output(form, as_json, file)
    counts = counts_of(values)
    several = len(runs) > 1 or bool(counts) or output.format == HTML
    _check_output(output, len(runs), several=several, table=table, all_rows=all_rows, what_ifs=what_ifs)
    is_alone = not several and output.format != CSV and "," not in f"{values['gpu']}{values['fabric']}"
    budget = _budget_of(values, output)
    added = [make for part in extras.parts("time_options") if (make := part.report(values, is_alone=is_alone))]
    axes = [str(values[name]).split(",") if values[name] else [None] for name in _AXES]
    if max(map(len, axes)) > 1:
        if several or what_ifs or output.format == CSV:
            raise click.UsageError("several GPUs or fabrics are for one run, as text, markdown or JSON, no --what-if")
        with reading(*runs):
            _print_table(runs[0], [(gpu, fabric) for gpu in axes[0] for fabric in axes[1]], values, output)
        return 0
    gpu, pricing = pricing_of(values)
    with reading(*runs):
        if several:
            from fakedist.results.job_time import time_job

            price_job = partial(time_job, runs, gpu, **pricing, **counts)
            _print_job(price_job, what_ifs, partial(_budgets, gpu, pricing, budget), output)
        else:
            from fakedist.report.content.time import priced_report
            from fakedist.results.opening import open_run

            run = open_run(runs[0])
            price = partial(run.priced_for, gpu, **pricing)
            changed_runs = {text: price(what_if=text) for text in what_ifs}
            priced, reports = price(gains=output.format != CSV), [make(run) for make in added]
            reports += _budgets(gpu, pricing, budget, priced)
            table = table or _DEFAULT_TABLE
            output.write(priced_report(priced, changed_runs, reports, all_rows=all_rows, table=table))
    return 0


def _print_job(
    price_job: Callable[..., JobTime],
    what_ifs: Sequence[str],
    added: Callable[[JobTime], Sequence[Report]],
    output: Output,
) -> None:
    from fakedist.report.content.job import step_report

    changed = {text: price_job(what_if=text) for text in what_ifs}
    job = price_job()
    output.write(step_report(job, changed, added(job), folder=output.folder))


def _budget_of(values: Mapping[str, object], output: Output) -> dict[str, Any]:
    """The options of a token budget that were given, checked against the others."""
    budget = given(BUDGET_OPTIONS, values)
    if "price" in budget and "tokens" not in budget:
        raise click.UsageError("--price needs --tokens")
    if budget and output.format == CSV:
        raise click.UsageError(f"--tokens is not for --format {CSV}")
    if budget and "," in f"{values['gpu']}{values['fabric']}":
        raise click.UsageError("--tokens is for one GPU and fabric, each at its own price")
    return budget


def _budgets(
    gpu: str | None, pricing: PricingOptions, budget: Mapping[str, Any], priced: Run | JobTime
) -> list[Report]:
    """The figures of the tokens of ``--tokens``; nothing without any."""
    from fakedist.report.content.token_budget import budget_report
    from fakedist.results.repricing import gpu_of
    from fakedist.results.run import Run
    from fakedist.results.token_budget import budget_of

    if not budget:
        return []
    first = priced if isinstance(priced, Run) else priced.runs[0]
    watts = gpu_of(first.manifest, gpu, pricing.get("power_watts")).watts
    return [budget_report(budget_of(priced, watts, **budget))]


def _check_output(
    output: Output, num_runs: int, *, several: bool, table: str | None, all_rows: bool, what_ifs: Sequence[str]
) -> None:
    if table is not None and output.format != CSV:
        raise click.UsageError("--table is for --format csv")
    if several and output.format == CSV:
        why = f"and {num_runs} were given" if num_runs > 1 else "not for the step of a job"
        raise click.UsageError(f"--format {CSV} is for one run, {why}")
    if several and all_rows:
        raise click.UsageError("--all-rows is for one run")
    if what_ifs and output.format == CSV:
        raise click.UsageError("--what-if is not for --format csv")


def _print_table(
    path: Path, chosen: Sequence[tuple[str | None, str | None]], values: Mapping[str, object], output: Output
) -> None:
    """Price a run for several GPUs and fabrics, and print a row for each."""
    from fakedist.report.content.gpu_models import GpuStep, gpus_report, lifting
    from fakedist.results.opening import open_run
    from fakedist.results.repricing import gpu_of

    run = open_run(path).keeping_tables()

    def price(choice: Mapping[str, object], what_if: str | None = None) -> GpuStep:
        gpu, pricing = pricing_of({**values, **choice})
        if what_if is not None:
            pricing["what_if"] = what_if
        priced = run.priced_for(gpu, **pricing)
        assert priced.summary.timed is not None
        return GpuStep(gpu_of(run.manifest, gpu, None), *priced.summary.timed)

    def lifted(choice: Mapping[str, object]) -> GpuStep:
        """The step, and the same with what would lift its limit."""
        step = price(choice)
        option, value = lifting(step)
        if not option:
            return step
        is_what_if = option == "--what-if"
        changed = price(choice, value) if is_what_if else price({**choice, option.removeprefix("--"): value})
        return replace(step, lifted_by=f"{option} {value}", lifted=changed.time)

    own = price({"gpu": None, "fabric": None})
    rows = [lifted({"gpu": gpu, "fabric": fabric}) for gpu, fabric in chosen]
    output.write(gpus_report(run.path, own, rows))
