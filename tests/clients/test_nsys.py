"""Real Nsight Systems around a rank on the virtual GPU: everything but a GPU's own kernels.

Debian has it (components contrib and non-free, ``apt-get install nsight-systems``: 2022.4). The kernels are made up,
one in each operation that would launch one, in the report that nsys itself made: its ranges are what the rank pushed.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.errors import SetupError
from fakedist.launcher.nsight import export_sqlite, find_nsys
from fakedist.results.opening import open_run
from fakedist.rundir.directory import KERNELS_NAME, NSYS_NAME, JournalWriter
from fakedist.traces.nsys_report import recorded_step
from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "small_ddp.py"
OPTIONS = ("--world-size", "8", "--rank", "0", "--device", "virtual")
LAUNCHES = re.compile(r"aten::(addmm|mm|clamp_min|native_layer_norm(_backward)?|mul_|_fused_adamw_)\b")
_KERNELS = """
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId
    INTEGER, globalPid INTEGER, demangledName INTEGER);
"""


def has_nsys() -> bool:
    try:
        find_nsys()
    except SetupError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not has_nsys(), reason="nsys is not installed: Debian's nsight-systems (contrib, non-free), or NVIDIA's package"
)


@pytest.fixture(scope="module")
def under_nsys(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Summary and directory of a run under nsys."""
    directory = tmp_path_factory.mktemp("nsys") / "run"
    return run_fakedist("profile", *OPTIONS, "--nsys", "--json", "-o", directory, JOB).json(), directory


@pytest.fixture(scope="module")
def kernels(under_nsys: tuple[dict[str, Any], Path], tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The table of kernels of a copy of that run, whose report got kernels."""
    copy = tmp_path_factory.mktemp("kernels") / "run"
    shutil.copytree(under_nsys[1], copy)
    exported = copy.parent / "report.sqlite"
    export_sqlite(copy / f"{NSYS_NAME}.nsys-rep", exported, 120)
    add_kernels(exported)
    (copy / KERNELS_NAME).unlink()
    journal = JournalWriter(copy / KERNELS_NAME)
    for record in recorded_step(copy, exported, copy / f"{NSYS_NAME}.nsys-rep"):
        journal.append(record)
    journal.close()
    from fakedist.results.building import build_tables

    build_tables(copy)
    found = open_run(copy).table("kernels")
    return found.assign(layer=open_run(copy).table("layers")["name"].to_numpy()[found["layer"]])


def add_kernels(path: Path) -> None:
    """One kernel in the middle of every operation that launches one."""
    connection = sqlite3.connect(path)
    connection.executescript(_KERNELS)
    text = "COALESCE(text, (SELECT value FROM StringIds WHERE id = textId))"
    ranges = connection.execute(
        f"SELECT start, end, globalTid, {text} FROM NVTX_EVENTS WHERE eventType = 59"
    ).fetchall()
    (free,) = connection.execute("SELECT MAX(id) + 1 FROM StringIds").fetchone()
    for number, (start, end, thread, name) in enumerate(row for row in ranges if LAUNCHES.match(row[3])):
        launched = (start + end) // 2
        connection.execute("INSERT INTO StringIds VALUES (?, ?)", (free + number, name.partition(",")[0]))
        row = (launched, end, thread, number + 1)
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", row)
        kernel = (end + 1000, end + 2000, 0, 7, number + 1, thread >> 24 << 24, free + number)
        connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", kernel)
    connection.commit()
    connection.close()


def test_the_report_is_kept_and_a_note_says_why_it_has_no_kernels(under_nsys: tuple[dict[str, Any], Path]) -> None:
    summary, directory = under_nsys
    assert (directory / f"{NSYS_NAME}.nsys-rep").stat().st_size > 10_000
    assert not list(directory.glob(f"{NSYS_NAME}.qdstrm")) + list(directory.glob(".nsys*"))
    assert [note for note in summary["notes"] if "has no kernels" in note["text"]]


def test_nsys_changes_nothing_of_the_memory(
    under_nsys: tuple[dict[str, Any], Path], run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    plain = run_fakedist("profile", *OPTIONS, "--no-kernels", "--json", "-o", tmp_path / "run", JOB).json()
    same = ("peak_allocated_bytes", "peak_reserved_bytes", "by_phase", "by_category", "layers", "collectives", "exit")
    assert {name: under_nsys[0][name] for name in same} == {name: plain[name] for name in same}
    assert [row["step"] for row in under_nsys[0]["steps"]] == [1, 2]


def test_every_kernel_of_the_forward_is_in_its_layer(kernels: pd.DataFrame) -> None:
    forward = kernels[(kernels["phase"] == "forward") & (kernels["family"] == "gemm")]
    wanted = [f"blocks.{block}.{name}" for block in range(3) for name in ("up", "down")] + ["head"]
    assert forward["layer"].drop_duplicates().tolist() == wanted


def test_every_kernel_of_the_backward_is_in_the_layer_whose_forward_made_it(kernels: pd.DataFrame) -> None:
    backward = kernels[(kernels["phase"] == "backward") & (kernels["family"] == "gemm") & ~kernels["recompute"]]
    wanted = [f"blocks.{block}.{name}" for block in (2, 1, 0) for name in ("down", "up")]
    assert backward["layer"].drop_duplicates().tolist() == ["head", *wanted]


def test_only_the_checkpointed_block_runs_again(kernels: pd.DataFrame) -> None:
    again = kernels[kernels["recompute"]]
    assert set(again["layer"]) == {"blocks.1", "blocks.1.norm", "blocks.1.up", "blocks.1.down"}
    assert set(again["phase"]) == {"backward"}


def test_the_copies_of_a_collective_are_communication(kernels: pd.DataFrame, under_nsys: tuple[Any, Path]) -> None:
    copies = kernels[kernels["family"] == "communication"]
    calls = open_run(under_nsys[1]).table("calls").set_index("sequence")
    assert len(copies)
    timed = calls.loc[copies["call"].unique()]
    assert timed["step"].tolist() == [4] * len(timed)
    assert timed["operation"].tolist() == ["all_reduce"] * len(timed)


def test_the_optimizers_kernels_are_its_own(kernels: pd.DataFrame) -> None:
    steps = kernels[kernels["operation"].str.startswith("aten._fused_adamw_")]
    assert set(kernels["step"]) == {4}
    assert set(steps["phase"]) <= {"optimizer"}


def test_a_rank_that_is_killed_under_nsys_keeps_its_records(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    finished = run_fakedist("profile", *OPTIONS, "--nsys", "--json", "-o", tmp_path / "run", JOB, "killed")
    assert finished.code == 137
    summary = open_run(tmp_path / "run").summary
    assert summary.exit.outcome == "killed"
    assert [row.step for row in summary.steps] == [1, 2]
    assert [note for note in summary.notes if note.text.startswith("no kernels from nsys: nsys wrote no report")]
