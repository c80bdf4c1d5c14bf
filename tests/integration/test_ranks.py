"""Several ranks, and what they receive from each other: the same as in the real job."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist, clean_environment
from tests.support.runs import Finished

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "jobs" / "sends_everything.py"


def received(output: str) -> dict[int, Any]:
    """The lines that each rank printed."""
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("GOT ")]
    return {int(rank): json.loads(got) for _, rank, got in lines}


@pytest.fixture(scope="module")
def really() -> dict[int, Any]:
    """Values that two real processes receive over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(JOB), "cpu"]
    finished = subprocess.run(command, env=clean_environment(), capture_output=True, text=True)
    return received(finished.stdout)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def both(run_fakedist: RunFakedist, directory: Path) -> Finished:
    """Both ranks on the virtual GPU; the first one's exit code is 3."""
    return run_fakedist("profile", "--world-size=2", "--rank=0,1", "-o", "runs", "--json", JOB, "cuda", cwd=directory)


def test_a_later_rank_receives_what_it_would_in_the_real_job(both: Finished, really: dict[int, Any]) -> None:
    assert received(both.stderr)[1] == really[1]


@pytest.mark.nightly
def test_ranks_side_by_side_receive_the_same(
    run_fakedist: RunFakedist, tmp_path: Path, both: Finished, really: dict[int, Any]
) -> None:
    finished = run_fakedist(
        *("profile", "--world-size=2", "--rank=0,1", "--jobs=2", "-o", "runs", "--json", JOB, "cuda"), cwd=tmp_path
    )
    assert received(finished.stderr)[1] == really[1]
    assert finished.code == both.code
    figures = [
        [(one["rank"], one["exit"], one["peak_reserved_bytes"], one["notes"]) for one in json.loads(text)["ranks"]]
        for text in (finished.stdout, both.stdout.replace(str(both_runs(both)), str(tmp_path / "runs")))
    ]
    assert figures[0] == figures[1]


def both_runs(both: Finished) -> Path:
    return Path(json.loads(both.stdout)["ranks"][0]["run_directory"]).parent


def test_a_rank_run_again_with_the_tapes_of_all_receives_that_too(
    run_fakedist: RunFakedist, both: Finished, directory: Path, really: dict[int, Any]
) -> None:
    assert received(both.stderr)[0] != really[0]
    again = run_fakedist(
        "profile", "--full", "--world-size=2", "--rank=0", "--tape=runs", "-o", "again", JOB, "cuda", cwd=directory
    )
    assert received(again.stdout)[0] == really[0]
    assert "answered from the tape of rank 1" in again.stdout


def test_a_failed_rank_keeps_no_other_from_running_and_gives_the_exit_code(both: Finished, directory: Path) -> None:
    found = json.loads(both.stdout)
    assert both.code == found["exit_code"] == 3
    assert [(one["rank"], one["exit"]["code"]) for one in found["ranks"]] == [(0, 3), (1, 0)]
    assert all(one["peak_reserved_bytes"] and one["wall_s"] > 0 for one in found["ranks"])
    assert [Path(one["run_directory"]) for one in found["ranks"]] == [directory / "runs" / f"rank{n}" for n in (0, 1)]
    assert "fakedist: exit 3: rank 0: the script's own exit code" in both.stderr


def test_a_rank_without_tapes_says_what_records_them(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    script = tmp_path / "needs.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "objects = ['plan'] if dist.get_rank() == 0 else [None]\n"
        "dist.broadcast_object_list(objects, 0)\n"
        "print('GOT', objects)\n"
    )
    alone = run_fakedist("profile", "--world-size=8", "--rank=5", "needs.py", "--flag", "a b", cwd=tmp_path)
    assert alone.code == 1
    (hint,) = [line for line in alone.stderr.splitlines() if "use its tape: " in line]
    told = hint.partition("fakedist ")[2]
    (peers,) = [
        line.partition("fakedist ")[2] for line in alone.stderr.splitlines() if "that this rank waits for: " in line
    ]
    assert peers == told.replace("--rank=0,5", "--rank=5 --with-peers")
    assert told.startswith("profile --world-size=8 --rank=0,5 ")
    assert told.endswith("needs.py --flag 'a b'")
    together = run_fakedist(*shlex.split(told), cwd=tmp_path)
    assert together.code == 0, together.stderr
    assert together.stdout.count("GOT ['plan']") == 2
    assert together.stdout.count(".fakedist/needs-ranks0-5of8/rank") == 2


@pytest.mark.nightly
def test_a_flag_that_another_rank_should_have_sent_is_named_where_the_script_reads_it(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    job = Path(__file__).parent / "jobs/flags.py"
    alone = run_fakedist("profile", "--world-size=8", "--rank=7", "--no-page", "--json", job, cwd=tmp_path).json()
    assert alone["steps"] == []
    left = alone["left_during_init"]
    assert re.fullmatch(r"broadcast from rank 0 at .*/flags\.py:10 \(<module>\)", left["not_sent"])
    assert alone["invented_values"] == 1
    together = run_fakedist("profile", "--json", *shlex.split(left["command"])[2:], cwd=tmp_path)
    assert together.code == 0, together.stderr
    ranks = json.loads(together.stdout)["ranks"]
    assert [(one["rank"], len(one["steps"]), one["invented_values"]) for one in ranks] == [(0, 2, 0), (7, 2, 0)]
    assert all(one["left_during_init"] is None for one in ranks)


@pytest.mark.nightly
def test_stages_that_wait_for_each_other_run_again_until_all_are_answered(
    run_fakedist: RunFakedist, tmp_path: Path
) -> None:
    job = Path(__file__).parents[1] / "clients/jobs/pytorch_pipeline.py"
    finished = run_fakedist(
        "profile", "--world-size=2", "--rank=0,1", "-o", "runs", "--json", job, "interleaved", cwd=tmp_path
    )
    assert finished.code == 0, finished.stderr
    assert "fakedist: rank 0 runs again: the tape of rank 1 has what it waited for" in finished.stderr
    ranks = json.loads(finished.stdout)["ranks"]
    assert [(one["rank"], one["exit"]["outcome"], len(one["steps"])) for one in ranks] == [
        (0, "stopped", 2),
        (1, "stopped", 2),
    ]


CHECKPOINT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("nccl")
rank, device = dist.get_rank(), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
model = torch.nn.Linear(64, 64, device=device)
final = Path("checkpoints/step10")
temporary = final.with_name("step10-tmp")
if rank == 0:
    temporary.mkdir(parents=True)
if "everybody-waits" in sys.argv:
    until = time.monotonic() + 0.5
    while not temporary.exists():
        if time.monotonic() > until:
            raise TimeoutError("waiting for the checkpoint's directory timed out")
dist.barrier()
if rank == 0:
    torch.save(model.state_dict(), temporary / "model.pt")
    temporary.replace(final)
dist.barrier()
path = [str(final.resolve())] if rank == 0 else [""]
dist.broadcast_object_list(path, src=0)
model.load_state_dict(torch.load(Path(path[0]) / "model.pt", map_location=device))
model(torch.ones(8, 64, device=device)).sum().backward()
print("LOADED")
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Where a job lies of which rank 0 writes a checkpoint, renames it, and tells all ranks where it is."""
    (tmp_path / "checkpoint.py").write_text(CHECKPOINT)
    return tmp_path


@pytest.mark.nightly
def test_a_guess_before_a_failure_is_named_and_its_rank_runs_with_peers(
    run_fakedist: RunFakedist, checkpoint: Path
) -> None:
    alone = run_fakedist("profile", "--world-size=64", "--rank=31", "checkpoint.py", cwd=checkpoint)
    assert alone.code == 1
    lines = alone.stderr.splitlines()
    place = next(place for place, line in enumerate(lines) if "rank 31 continued with a guess" in line)
    assert f"broadcast_object_list from rank 0 at {checkpoint}/checkpoint.py:25 (<module>)" in lines[place + 1]
    assert "this rank's own ''" in lines[place + 1]
    (told,) = [line.partition(": fakedist ")[2] for line in lines if "--with-peers" in line]
    together = run_fakedist(*shlex.split(told), cwd=checkpoint)
    assert together.code == 0, together.stderr
    assert together.stdout.count("LOADED") == 2
    assert "fakedist: rank 31 waits for rank 0, which runs now, into " in together.stderr
    assert "rank    31 of 64" in together.stdout


def test_a_directory_that_an_earlier_rank_renamed_is_named_with_what_became_of_it(
    run_fakedist: RunFakedist, checkpoint: Path
) -> None:
    finished = run_fakedist(
        "profile", "--world-size=64", "--rank=0,31", "checkpoint.py", "everybody-waits", cwd=checkpoint
    )
    assert finished.code == 1
    (told,) = [line for line in finished.stderr.splitlines() if "which this rank looked for" in line]
    where = checkpoint / "checkpoints"
    assert told.startswith(
        f"fakedist: {where}/step10-tmp, which this rank looked for, is missing: rank 0, which ran earlier"
    )
    assert f"renamed it to {where}/step10 at {checkpoint}/checkpoint.py:22 (<module>)" in told
