"""Processes that a script starts share the memory of the rank's GPU, and have values and groups of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakedist.rank import joining
from fakedist.results.opening import open_run
from tests.conftest import ROOT, RunFakedist

JOB = Path(__file__).parent / "jobs/starts_processes.py"
GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(scope="module")
def found(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("started")
    options = ["--world-size", "8", "--rank", "0", "--gpu-memory", "10GiB", "--no-page", "--output", "run"]
    finished = run_fakedist("profile", *options, JOB, cwd=directory)
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("FOUND "))
    answers = json.loads(line.removeprefix("FOUND "))
    assert isinstance(answers, dict)
    use = open_run(directory / "run").table("device_use")
    answers["most"] = use.groupby(["process", "part"], sort=False, observed=True)["bytes"].max().to_dict()
    summary = json.loads((directory / "run/run.json").read_text())["summary"]
    return answers | {"notes": [note for note in summary["notes"] if note["code"] == "started_out_of_memory"]}


@pytest.mark.long
def test_a_started_process_takes_memory_of_the_ranks_gpu_until_it_ends(found: dict[str, Any]) -> None:
    assert found["before"] == 9 * GIB
    assert found["while it runs"] == found["seen"] == 6 * GIB - 2 * MIB, "the tensor of its group, too"
    assert (found["after"], found["code"]) == (9 * GIB, 0)
    free, ones = found["program"]
    assert (int(free), float(ones)) == (8 * GIB, 8.0), "a program has values, too"


@pytest.mark.long
def test_processes_that_a_server_forks_join_too(found: dict[str, Any]) -> None:
    assert found["server"] == [[8 * GIB, 8.0]] * 2
    assert found["after servers"] == 9 * GIB


@pytest.mark.long
def test_a_started_process_is_out_of_memory_as_on_one_gpu(found: dict[str, Any]) -> None:
    assert "Tried to allocate 10.00 GiB" in found["too much"]
    assert "6.00 GiB is free" in found["too much"]
    assert "has 1024.00 MiB memory in use" in found["too much"], "the rank"
    (note,) = found["notes"]
    who, *_, held = note["text"].partition(" was out of memory: it asked for 10.00 GiB at ")
    assert re.fullmatch(r"a process that the script started, \S+ \(\d+\),", who)
    assert held.endswith("when it held 3.00 GiB, and the rank's other processes 1.00 GiB, of the GPU's 10.00 GiB")
    assert "starts_processes.py:33" in held


@pytest.mark.long
def test_a_started_process_has_a_group_of_its_own_and_no_other(found: dict[str, Any]) -> None:
    assert found["sum"] == 4.0
    assert "fakedist: a process that the script started joins a group of 2 ranks" in found["two"]


@pytest.mark.long
def test_the_course_of_the_gpu_names_started_processes(found: dict[str, Any]) -> None:
    servers = [(f"ForkServerProcess-{number}", "all") for number in (3, 4)]
    assert list(found["most"]) == [
        ("", "allocator"),
        ("", "outside"),
        ("SpawnProcess-1", "all"),
        *servers,
        ("python -c", "all"),
    ]
    assert list(found["most"].values()) == [GIB, 0, 3 * GIB + 2 * MIB, *[GIB + 2 * MIB] * 3]


@pytest.mark.long
def test_a_process_without_cuda_gets_nothing_but_the_driver(found: dict[str, Any]) -> None:
    assert found["no gpu"][:2] == [3.0, False]


def _python(code: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = [os.path.join(ROOT, "fakedist/rank/started"), str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_the_environments_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("RAN = True\n")
    code = "import sitecustomize, sys; print(sitecustomize.RAN, any('started' in path for path in sys.path))"
    done = _python(code, tmp_path, FAKEDIST_LEDGER="/proc/1/fd/1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True False\n", "")


def test_a_process_whose_rank_has_no_run_directory_says_so_in_one_line(tmp_path: Path) -> None:
    done = _python("import torch", tmp_path, FAKEDIST_LEDGER="/proc/1/fd/1", **{joining.RUN_VARIABLE: str(tmp_path)})
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fakedist: this process cannot use its rank's virtual GPU: ")


def test_a_process_that_became_another_rank_does_not_join(tmp_path: Path) -> None:
    code = "import os, sys; os.environ['FAKEDIST_LEDGER'] = '/proc/2/fd/2'; import pynvml"
    done = _python(code, tmp_path, FAKEDIST_LEDGER="/proc/1/fd/1", **{joining.RUN_VARIABLE: str(tmp_path)})
    assert "cannot use" not in done.stderr


@pytest.fixture(scope="module")
def engine(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("engine")
    options = ["--world-size", "1", "--gpus-per-node", "2", "--output", "run"]
    finished = run_fakedist("profile", *options, JOB.with_name("starts_an_engine.py"), cwd=directory)
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("FOUND "))
    answers = json.loads(line.removeprefix("FOUND "))
    assert isinstance(answers, dict)
    use = open_run(directory / "run").table("device_use")
    return answers | {"others": use[use["part"] == "all"].groupby("process", observed=True)["bytes"].max().to_dict()}


def test_an_engines_processes_have_groups_of_their_hosts_and_the_ranks_own_for_gpus(engine: dict[str, Any]) -> None:
    assert engine["codes"] == [0, 0]
    for rank, found in enumerate(engine["ranks"]):
        assert found["hosts"] == 1.0 + 2.0, "gloo sums what the two processes have"
        assert found["gpus"] == [2 * (1.0 + rank)] * 4, "the other rank is like this one"


def test_an_engines_processes_send_each_other_objects(engine: dict[str, Any]) -> None:
    for found in engine["ranks"]:
        assert found["objects"] == found["through gpus"] == engine["pids"]
        assert found["sent"] == [{"from": 1}]


def test_an_engines_processes_hold_memory_of_their_own_gpus_and_none_by_mapping(engine: dict[str, Any]) -> None:
    assert engine["used"] == [64 + 2, 128 + 2], "MiB of each GPU; small tensors take 2"
    assert [found["mapped"] for found in engine["ranks"]] == [2 * engine["used"]] * 2
    assert engine["after"] == [0, 0]
    assert engine["others"] == {"SpawnProcess-1": 66 * MIB}, "the rank's GPU is the first"


def test_an_engines_group_for_hosts_and_gpus_at_once_is_refused(engine: dict[str, Any]) -> None:
    for found in engine["ranks"]:
        assert found["both"].startswith("fakedist: an engine's processes join a group of backend cpu:gloo,cuda:nccl")


#: Programs of a script that starts its own ranks, and what the line to type ends with.
_LAUNCHING = {
    "programs of ranks": (
        (
            "for rank in range(4):\n"
            "    own = {**os.environ, 'RANK': str(rank), 'WORLD_SIZE': '4'}\n"
            "    subprocess.run([sys.executable, '-u', '-X', 'utf8', 'train.py', '--lr', '1'], env=own)\n"
        ),
        " --no-page train.py --lr 1",  # without the options of Python, which torchrun gives it too
    ),
    "a launcher in its place": (
        "os.execvp('torchrun', ['torchrun', '--nproc-per-node', '4', 'train.py', '--lr', '1'])\n",
        " --no-page train.py --lr 1",
    ),
    "itself again": (
        (
            "if 'AGAIN' not in os.environ:\n"
            "    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, 'AGAIN': '1'})\n"
            "import torch\ntorch.ones(1, device='cuda')\n"
        ),
        " --no-page --env=AGAIN=1 launch.py",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("how", _LAUNCHING)
def test_programs_that_are_ranks_end_the_job_with_the_line_to_type(
    run_fakedist: RunFakedist, tmp_path: Path, how: str
) -> None:
    launch, last = _LAUNCHING[how]
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "launch.py").write_text(f"import os, subprocess, sys\n{launch}")
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    finished = run_fakedist(
        "profile", "--world-size", "4", "--rank", "2", "--no-page", "launch.py", cwd=tmp_path, env=path
    )
    assert finished.code == 1
    error, hint = finished.stderr.splitlines()[-2:]
    assert error.endswith(", which the script started, is a rank of its own of the job; fakedist runs rank 2 alone")
    assert hint.startswith("  fakedist profile --world-size=4 --rank=2 ")
    assert set(last.split()) <= set(hint.split())
    assert hint.endswith(last.rpartition("=1")[2])
