"""``fakedist export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.output import JSON, TEXT, RunPath, chosen_output, output_option, reading, remark, say
from fakedist.rundir.notes import counted

if TYPE_CHECKING:
    from fakedist.extras.chakra.chakra import Exported

#: ASTRA-sim's analytical backend, as its build names it.
_ASTRA_SIM = "AstraSim_Analytical_Congestion_Aware"


@click.command()
@click.argument("runs", nargs=-1, required=True, type=RunPath(), metavar="RUN...")
@output_option("directory", "DIR", "The directory to write into.", required=True)
@click.option("--format", "form", type=click.Choice(["chakra"]), required=True, help="Format of the traces.")
@click.option("--name", metavar="NAME", help="What the files' names begin with.  [default: the script's name]")
@click.option("--force", is_flag=True, help="Replace files of the same names.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def export(runs: tuple[Path, ...], *, directory: Path, form: str, name: str | None, force: bool, as_json: bool) -> int:
    """Write the timed steps of runs for network simulators.

    Each RUN is the run directory of a rank of one job on the virtual GPU. With --format chakra: MLCommons Chakra
    execution traces, NAME.RANK.et, and NAME.groups.json, which ASTRA-sim reads (docs/export.md). Durations are those
    that fakedist time prices.
    """
    from fakedist.extras.chakra.chakra import export_chakra
    from fakedist.report.writing import see_that_it_can_be_written
    from fakedist.results.opening import open_run

    output = chosen_output(JSON if as_json else TEXT, as_json)
    see_that_it_can_be_written(directory, is_directory=True)
    with reading(*runs):
        exported = export_chakra([open_run(run) for run in runs], directory, name=name or "", force=force)
    if output.format == JSON:
        output.write_object(_object(exported, form))
        return 0
    for trace in exported.traces:
        nodes = ", ".join(f"{number:,} {kind}" for kind, number in trace.num_nodes.items())
        say(f"{trace.path}: {sum(trace.num_nodes.values()):,} nodes: {nodes}")
    say(f"{exported.groups}: {len(exported.names):,} groups")
    say(
        f"  {_ASTRA_SIM} --workload-configuration={exported.prefix} --comm-group-configuration={exported.groups} ..."
        "   simulates them"
    )
    for text in _remarks(exported):
        remark(text)
    return 0


def _object(exported: Exported, form: str) -> dict[str, object]:
    return {
        "format": form,
        "world_size": exported.world_size,
        "traces": [
            {
                "rank": trace.rank,
                "file": str(trace.path),
                "num_nodes": trace.num_nodes,
                "collectives": trace.collectives,
            }
            for trace in exported.traces
        ],
        "groups_file": str(exported.groups),
        "groups": {str(number): name for number, name in exported.names.items()},
        "remarks": _remarks(exported),
    }


def _remarks(exported: Exported) -> list[str]:
    remarks = []
    if (missing := exported.world_size - len(exported.traces)) > 0:
        lacking = counted(missing, "is", "are")
        remarks.append(f"ASTRA-sim reads a trace of each of the {exported.world_size:,} ranks: {lacking} missing")
    if unknown := sum(trace.num_nodes.get("unknown", 0) for trace in exported.traces):
        invalid = counted(unknown, "call is an invalid node", "calls are invalid nodes")
        remarks.append(f"{invalid}: the operation or the ranks are not known")
    for kind, number in exported.not_simulated.items():
        remarks.append(f"ASTRA-sim refuses {kind}: {counted(number, 'node')}")
    return remarks


COMMAND = export
