"""Reads a trace of a real GPU, whatever tool wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fakedist.rundir.collector import no_collector
from fakedist.traces.chrome_trace import read_chrome_trace
from fakedist.traces.foreign_files import kind_of
from fakedist.traces.inferring import Functions, memory_records
from fakedist.traces.nsys_report import open_database, read_process, read_report
from fakedist.traces.one_step import StepChoice, find_path, one_step
from fakedist.traces.step_trace import ProcessTrace
from fakedist.traces.traced_step import ImportedStep, LayerNumbers, Tool


def read_trace_file(exported: Path, called: Path, choice: StepChoice = StepChoice()) -> ProcessTrace:  # noqa: B008
    """Read a Chrome trace or an SQLite export of nsys; ReportError if it is not one or lacks kernels of the process."""
    if kind_of(exported) == "sqlite":
        with open_database(exported, called) as database:
            return read_process(database, choice)
    return read_chrome_trace(exported, choice)


def read_step(exported: Path, called: Path, choice: StepChoice) -> ImportedStep:
    """Read one step of a Chrome trace or an SQLite export of nsys; ReportError if the file has no such step."""
    if kind_of(exported) == "sqlite":
        return read_report(exported, called, choice)
    with no_collector():
        process = read_chrome_trace(exported, choice)
        trace, layers = one_step(process, choice, called), LayerNumbers()
        trace = replace(trace, path=find_path(trace, Functions(process, process.functions["thread"]).lines))
        step = ImportedStep.of(called, trace, Tool(process.tool, report=str(called)), layers)
        return replace(step, records=[*step.records, *memory_records(process, trace, layers)])
