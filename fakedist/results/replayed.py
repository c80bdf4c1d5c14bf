"""A finished run as advice reads it: its evidence, and the memory that its rank may reserve."""

from __future__ import annotations

import pandas as pd

from fakedist.analysis.evidence import Evidence, Room, Setup
from fakedist.analysis.memory_tables import fold_layers
from fakedist.gpu.models.catalogue import gpu_of_product
from fakedist.gpu.models.spec import GpuSpec
from fakedist.results.run import Run
from fakedist.results.summing_up import room_of, setup_of

_TABLES = ("blocks", "asleep", "layers", "spans", "calls", "groups", "events", "stacks", "steps", "frames", "shares")


def evidence_tables(run: Run) -> dict[str, pd.DataFrame] | None:
    """The tables that advice reads; None if the run lacks one, or has blocks of an engine that sleeps."""
    if not all(run.has(name) for name in _TABLES) or run.num_rows("asleep"):
        return None  # a curve of the page counts what sleeps
    return {name: run.table(name) for name in (*_TABLES, "kernels") if run.has(name)}


def evidence_of(run: Run) -> Evidence | None:
    """The run's tables in the form that the rules of advice use; None as of :func:`evidence_tables`."""
    tables = evidence_tables(run)
    return None if tables is None else Evidence(tables, fold_layers(tables["layers"]), setup_of_run(run))


def setup_of_run(run: Run, gpu: GpuSpec | None = None) -> Setup:
    """The job's command line and hosts, with the run's GPU or another."""
    gpu = gpu or gpu_of_product(run.summary.gpu)
    return setup_of(run.manifest.job, 0.0 if gpu is None else gpu.host_bandwidth)


def room_of_run(run: Run) -> Room:
    """The memory that a run may reserve, and its step."""
    summary = run.summary
    return room_of(summary.exit, summary.out_of_memory, summary.capacity_bytes, summary.estimated_outside, summary.time)
