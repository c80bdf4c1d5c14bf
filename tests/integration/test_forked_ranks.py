"""Ranks that fork from a server: every table of their runs is that of a rank that started on its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.task import Task, TaskResult
from fakedist.options import Job
from fakedist.rundir.directory import load_manifest
from tests.conftest import ROOT, clean_environment

pytestmark = pytest.mark.long

JOBS = ROOT / "tests" / "integration" / "jobs"
SAYS_HOW = JOBS / "says_how.py"
EXAMPLES = ROOT / "examples"
MEGATRON = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 --bf16 --lr 1e-4 "
    "--max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1024 --exit-interval 2"
)
#: When something happened, and addresses: a stream is named by its own, which differs from one process to the next.
#: Also what malloc had given, which follows what the process had imported.
MAY_DIFFER = {"time_us", "start_us", "wall_us", "alloc_us", "free_us", "stream", "other_bytes"}


@pytest.fixture
def processes() -> Iterator[TaskProcesses]:
    made = TaskProcesses(clean_environment() | {"FAKEDIST_HOST_CLOCK": "0"}, fork=True)  # which no two runs share
    yield made
    made.close()


def ran(processes: TaskProcesses, cwd: Path, name: str, script: Path, *arguments: str) -> TaskResult:
    job = Job.from_dict(
        {"world_size": 8, "rank": 4, "device": "virtual", "page": False, "target": str(SAYS_HOW)}
        | {"arguments": [str(script), *arguments]}
    )
    return processes.run(Task(key=name, job=job, directory=cwd / name, cwd=cwd))


def assert_same_tables(one: Path, other: Path) -> None:
    names = sorted(path.name for path in (one / "tables").iterdir())
    assert names == sorted(path.name for path in (other / "tables").iterdir())
    for name in names:
        first, second = (pd.read_parquet(run / "tables" / name) for run in (one, other))
        kept = [column for column in first.columns if column not in MAY_DIFFER]
        pd.testing.assert_frame_equal(first[kept], second[kept], obj=name)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (JOBS / "sets_first.py", ()),
        (JOBS / "lazy_cuda.py", ()),
        (EXAMPLES / "llama_fsdp2.py", ("--num-layers=2", "--tp=4")),
    ],
    ids=["sets first", "lazy CUDA", "fsdp2"],
)
@pytest.mark.nightly  # the last test here compares the tables of one script
def test_every_table_of_a_forked_rank_is_that_of_a_cold_start(
    processes: TaskProcesses, tmp_path: Path, script: Path, arguments: tuple[str, ...]
) -> None:
    cold, forked = (ran(processes, tmp_path, name, script, *arguments) for name in ("cold", "forked"))
    assert (cold.failure, forked.failure) == ("", "")
    first, second = cold.output.splitlines(), forked.output.splitlines()
    assert (first[0], second[0]) == ("COLD", "FORKED"), forked.output
    assert [line for line in second[1:] if "STATE" in line or "SNAP" in line] == [
        line for line in first[1:] if "STATE" in line or "SNAP" in line
    ]
    assert_same_tables(cold.directory, forked.directory)
    assert not any(note.code == "started_again" for note in load_manifest(forked.directory).notes)


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("megatron") is None, reason="not installed: pip install --no-deps megatron-core==0.16.1")
def test_ranks_of_megatron_core_fork(processes: TaskProcesses, tmp_path: Path) -> None:
    """Importing it counts devices, adds to sys.path, runs an operation and compiles functions: each rank imports it.

    wandb, which it imports, comes from the server.
    """
    script, arguments = EXAMPLES / "megatron_gpt.py", MEGATRON.split()
    first = TaskProcesses(clean_environment())  # fills Inductor's cache
    results = [ran(each, tmp_path, name, script, *arguments) for each, name in ((first, "first"), (processes, "cold"))]
    results.append(ran(processes, tmp_path, "forked", script, *arguments))
    assert [(each.failure, each.output.splitlines()[0]) for each in results] == [
        ("", "COLD"),
        ("", "COLD"),
        ("", "FORKED"),
    ]
    assert_same_tables(results[1].directory, results[2].directory)
    assert not any(note.code == "started_again" for note in load_manifest(results[2].directory).notes)


SETS = """
import os, sys
if sys.argv[1]:
    os.environ["OF_POINT"] = sys.argv[1]
import torch
torch.ones(3, device="cuda")
"""


def test_a_rank_that_differs_from_the_first_starts_again_and_says_why(processes: TaskProcesses, tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text(SETS)
    script = tmp_path / "sets.py"
    results = [ran(processes, tmp_path, f"{number}", script, value) for number, value in enumerate(["a", "a", "b", ""])]
    starts = [[line for line in each.output.splitlines() if line in ("COLD", "FORKED")] for each in results]
    assert starts == [["COLD"], ["FORKED"], ["FORKED", "COLD"], ["FORKED", "COLD"]]
    notes = [
        [note.text for note in load_manifest(each.directory).notes if note.code == "started_again"] for each in results
    ]
    assert (notes[0], notes[1]) == ([], [])
    assert [texts[0].startswith("OF_POINT was not as in the first rank") for texts in notes[2:]] == [True, True]
    assert_same_tables(results[0].directory, results[1].directory)
