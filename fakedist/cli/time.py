"""``fakedist time``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from fakedist.cli.output import CSV, JSON, MARKDOWN, TEXT, chosen_output, file_option, format_options
from fakedist.job.kinds import RefusedError, variables, watts

#: What ``--format csv`` shows unless ``--table`` names another table.
_DEFAULT_TABLE = "layer_times"


def _power(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    kind = watts()
    try:
        return None if value is None else float(str(kind.read(kind.of_texts([value]))))
    except RefusedError as error:
        raise click.UsageError(f"--gpu-power {error}", ctx) from None


def _variables(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    try:
        return dict(str(value).split("=", 1) for value in variables().texts(variables().of_texts(values)))
    except RefusedError as error:
        raise click.UsageError(f"--nccl-env {error}", ctx) from None


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--gpu", metavar="MODEL", help="GPU model, or a GPU file: my_gpu.toml.  [default: the run's]")
@click.option(
    "--gpu-power", metavar="WATTS", callback=_power, help="Power limit of the GPU in watts.  [default: the model's]"
)
@click.option(
    "--times", metavar="FILE", help="Times of your own GPU: what fakedist calibrate wrote.  [default: the run's]"
)
@click.option("--fabric", metavar="NAME", help="Interconnect: a preset, or a fabric file.  [default: the run's]")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(1, 4096),
    metavar="N",
    help="GPUs in one NVLink domain.  [default: the run's]",
)
@click.option(
    "--no-interference", is_flag=True, help="Kernels and collectives that run at once do not slow each other."
)
@click.option(
    "--what-if",
    "what_ifs",
    multiple=True,
    metavar="CHANGE",
    help="Show what a change would give: merge=A,B, separate=A, bandwidth=2x, bandwidth=nvlink:2x, fabric=NAME, "
    "gpus-per-node=N or no-overlap. Repeatable, each on its own.",
)
@click.option(
    "--nccl-env",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_variables,
    help="A variable of NCCL's, before those that the run had. Repeatable.",
)
@click.option(
    "--moe-imbalance",
    type=click.FloatRange(1, 1000),
    default=1.0,
    metavar="F",
    help="Load of the busiest rank's experts, in even shares: scales all_to_all and grouped products.  [default: 1]",
)
@file_option
@format_options(TEXT, JSON, MARKDOWN, CSV)
@click.option("--table", metavar="NAME", help=f"The table for --format csv.  [default: {_DEFAULT_TABLE}]")
@click.option("--all-layers", is_flag=True, help="Do not fold repeated layers.")
def time(
    run: Path,
    *,
    gpu: str | None,
    gpu_power: float | None,
    times: str | None,
    fabric: str | None,
    gpus_per_node: int | None,
    no_interference: bool,
    what_ifs: tuple[str, ...],
    nccl_env: dict[str, str],
    moe_imbalance: float,
    file: Path | None,
    form: str | None,
    as_json: bool,
    table: str | None,
    all_layers: bool,
) -> int:
    """Estimate the timed step of a run on another GPU or interconnect, without running the script.

    RUN is a run directory that was made on the virtual GPU. Its launches are priced again; its memory stays as it is,
    and so do the kernels that PyTorch chose for the run's own GPU.
    """
    output = chosen_output(form, as_json, file)
    if table is not None and output.format != CSV:
        raise click.UsageError("--table is for --format csv")
    if what_ifs and output.format == CSV:
        raise click.UsageError("--what-if is not for --format csv")
    from fakedist.report.text import priced_time
    from fakedist.report.text.csv_table import table_csv
    from fakedist.results.opening import open_run

    price = partial(
        open_run(run).priced_for,
        gpu,
        power_watts=gpu_power,
        times=times,
        fabric=fabric,
        gpus_per_node=gpus_per_node,
        interference=not no_interference,
        nccl_env=nccl_env,
        moe_imbalance=moe_imbalance,
    )
    priced = price()
    changed = priced_time.what_if_steps(priced, {text: price(what_if=text) for text in what_ifs})
    if output.format == JSON:
        output.write_object(priced_time.priced_object(priced, changed))
    elif output.format == MARKDOWN:
        output.write(priced_time.priced_markdown(priced, all_layers=all_layers, what_ifs=changed))
    elif output.format == CSV:
        output.write(table_csv(priced, table or _DEFAULT_TABLE, all_layers=all_layers))
    else:
        output.render(
            lambda console: priced_time.render_priced(priced, console, all_layers=all_layers, what_ifs=changed)
        )
    return 0
