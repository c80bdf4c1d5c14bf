"""Opens runs: a run directory, or a torch memory snapshot as a run of which only the memory is known."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from fakedist.errors import RunDirectoryError
from fakedist.results.building import open_imported
from fakedist.results.run import Run, RunTables
from fakedist.rundir.directory import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    PAGE_NAME,
    TAPE_NAME,
    TRACE_NAME,
    Manifest,
    is_in_use,
    load_manifest,
)
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.traces.foreign_files import kind_of

#: Tables that mean nothing without steps, which a snapshot does not have.
_STEP_TABLES = ("spans", "phases", "named_phases", "device_use")
#: Files of a run directory that are not a run by themselves. Its snapshot is.
_OF_A_RUN = (MANIFEST_NAME, JOURNAL_NAME, PAGE_NAME, TRACE_NAME, TAPE_NAME)
_EXPORT = "nsys export --type sqlite {}   makes a file to give here"
#: Endings of other files, what they are, and what to type for one.
_OTHER_FILES = (
    ((".nsys-rep", ".qdrep"), "a report of Nsight Systems that is not exported", _EXPORT),
    ((".qdstrm",), "a stream of Nsight Systems that is not yet a report", "QdstrmImporter --input-file {}   makes one"),
    (
        (".ncu-rep",),
        "a report of Nsight Compute, which has no steps",
        "nsys profile --trace=cuda,nvtx ...   traces them",
    ),
    ((".py",), "a script, not a run", "fakedist profile --world-size 8 --rank 0 {}"),
)


def open_run(path: str | os.PathLike[str] | Run) -> Run:
    """Open a run directory, or a file of a real GPU: a memory snapshot, a trace or a report.

    Args:
        path: What ``fakedist profile``, torch.cuda.memory._dump_snapshot(), torch.profiler or `nsys export` made. An
            open run is returned as it is.

    Raises:
        RunDirectoryError: The path is none of them, or cannot be read.
        ReportError: A trace or a report is damaged, or has no kernels.
    """
    if isinstance(path, Run):
        return path
    path = Path(path)
    if not path.is_file():
        return open_run_directory(path)
    if path.name in _OF_A_RUN and (path.parent / MANIFEST_NAME).is_file():
        raise RunDirectoryError(f"{path} is one file of a run: give the run", _in_place(path, path.parent))
    for endings, what, hint in _OTHER_FILES:
        if path.name.endswith(endings):
            raise RunDirectoryError(f"{path} is {what}", hint.format(shlex.quote(str(path))))
    if kind_of(path) != "other":
        return open_imported(path)
    return open_snapshot(path)


def _in_place(path: Path, run: Path) -> str:
    """The command of this process with the run in place of one of its files."""
    given = [str(run) if argument == str(path) else argument for argument in sys.argv[1:]]
    return shlex.join(["fakedist", *given]) if str(run) in given else f"fakedist report {shlex.quote(str(run))}"


def open_run_directory(path: Path) -> Run:
    """Open a run directory. Its tables are computed in memory if fakedist was killed before it could write them.

    Raises:
        RunDirectoryError: It is not a run directory, it is damaged, or the run has not ended.
    """
    manifest = load_manifest(path)
    if manifest.summary is None:
        if is_in_use(path):
            raise RunDirectoryError(f"{path} is still being written", "wait for the run to end")
        from fakedist.results.building import compute_tables, summarized  # slow to import, and rarely needed

        computed = compute_tables(path, may_be_empty=False)
        manifest = summarized(manifest, computed)
        assert manifest.summary is not None
        return Run(path.resolve(), manifest, manifest.summary, RunTables(None, computed.tables))
    path = path.resolve()
    return Run(path, manifest, manifest.summary, RunTables(path))


def open_snapshot(path: Path, device: int | None = None) -> Run:
    """Open a torch memory snapshot as a run of one rank, by default of the device with the longest history.

    Raises:
        RunDirectoryError: It is not a snapshot, or tries to run code.
    """
    from fakedist.analysis.blocks import build_blocks, event_places
    from fakedist.analysis.memory_tables import find_peak, fold_layers
    from fakedist.results.building import make_tables
    from fakedist.results.summing_up import summarize
    from fakedist.rundir.collector import no_collector
    from fakedist.traces.foreign_files import SNAPSHOT_HINT, read_snapshot
    from fakedist.traces.snapshot_reading import Histories, NoDeviceError, NoSnapshotError, read_foreign

    with no_collector():
        try:
            histories = Histories()
            snapshot = read_foreign(read_snapshot(path, histories.watch), device, histories)
        except NoSnapshotError as error:
            raise RunDirectoryError(f"{path} is not a memory snapshot: {error}", SNAPSHOT_HINT) from None
        except NoDeviceError as error:
            raise RunDirectoryError(f"{path} has {error.args[0]}", error.args[1]) from None
    path, recording = path.resolve(), snapshot.recording
    blocks, positions = build_blocks(recording), event_places(recording)
    tables, has_steps = make_tables(recording, blocks, positions), snapshot.is_inferred
    manifest = Manifest(
        command=[],
        cwd="",
        git_commit="",
        created="",
        job=None,
        exit=Ending(Outcome.FINISHED, 0),
        versions={},
        provenance={"memory": "measured: the caching allocator's own history"},
        notes=snapshot.notes,
    )
    summary = summarize(
        recording,
        None,
        tables,
        fold_layers(tables["layers"]),
        ending=manifest.exit,
        left=None,
        peak=find_peak(blocks, positions),
        times=None,
        notes=snapshot.notes,
        has_steps=has_steps,
    )
    known = RunTables(None, {name: table for name, table in tables.items() if has_steps or name not in _STEP_TABLES})
    num_events = len(tables["events"]) - recording.num_events_before
    return Run(path, manifest, summary, known, device=f"cuda:{recording.device}", num_events=num_events)
