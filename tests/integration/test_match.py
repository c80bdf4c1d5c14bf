"""fakedist match, on runs of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import RunFakedist
from tests.integration.test_job_time import profile_stages
from tests.support.runs import made_once

pytestmark = pytest.mark.long

FAULTY = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
weight = torch.ones(8, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    loss = weight.sum()
    loss.backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    if rank == 0 and step == 1:
        dist.barrier()
"""


@pytest.fixture(scope="module")
def faulty(run_fakedist: RunFakedist) -> Path:
    """Runs of both ranks of a job in which rank 0 alone is in a barrier."""

    def make(folder: Path) -> None:
        (folder / "train.py").write_text(FAULTY)
        options = ("--world-size", "2", "--rank", "distinct", "--device", "virtual", "--until", "end", "--no-kernels")
        finished = run_fakedist("profile", *options, "-o", "runs", "--json", "train.py", cwd=folder)
        assert finished.code == 0, finished.stderr
        assert "0 of 1 kinds of ranks are checked by 1 ranks; 1 run next" in finished.stderr
        kinds = json.loads(finished.stdout)["kinds"]
        assert [(kind["ranks"], kind["ran"], kind["checked"]) for kind in kinds] == [("0", [0], True), ("1", [1], True)]

    return made_once(FAULTY, make) / "runs"


def test_a_job_that_hangs_is_told_with_its_lines(faulty: Path, run_fakedist: RunFakedist) -> None:
    told = run_fakedist("match", faulty)
    assert told.code == 5
    assert told.stderr == "fakedist: exit 5: calls of ranks 0,1 do not match: they differ in operation\n"
    assert "rank 0: barrier float32 4 B, group default_pg (ranks 0,1), step 2" in " ".join(told.stdout.split())
    printed = json.loads(run_fakedist("match", faulty / "rank0", faulty / "rank1", "--json").stdout)
    assert (printed["matched"], printed["difference"]["what"]) == (False, "operation")
    barrier, reduction = printed["difference"]["calls"]
    assert (barrier["operation"], reduction["operation"], reduction["reduction"]) == ("barrier", "all_reduce", "SUM")
    line = next(number for number, text in enumerate(FAULTY.splitlines(), 1) if "barrier" in text)
    assert barrier["lines"][0].endswith(f"train.py:{line} (<module>)")


def test_the_stages_of_a_pipeline_match(run_fakedist: RunFakedist) -> None:
    runs, _ = profile_stages(run_fakedist)
    told = run_fakedist("match", runs, "--json")
    assert told.code == 0, told.stdout
    printed = json.loads(told.stdout)
    assert (printed["ranks"], printed["not_recorded"]) == ([0, 2], "1,3,4,5,6,7")
    assert printed["num_calls"] > 100


def test_one_run_is_refused(faulty: Path, run_fakedist: RunFakedist) -> None:
    refused = run_fakedist("match", faulty / "rank0")
    assert refused.code == 2
    assert "holds the run of one rank, and it takes two or more to match" in refused.stderr


SENDS_LATE = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
tensor = torch.ones(1 << 20, device="cuda")
point_to_point = (dist.send, dist.recv)[rank]
point_to_point(tensor, 1 - rank)  # makes the communicators, for which the hosts wait
dist.all_reduce(tensor)
if rank == 0:
    dist.all_reduce(tensor)
    dist.send(tensor, 1)
else:
    dist.recv(tensor, 0)  # its stream waits for it before the all_reduce
    dist.all_reduce(tensor)
"""


def test_a_receive_holds_up_the_stream_of_nccl(run_fakedist: RunFakedist) -> None:
    def make(folder: Path) -> None:
        (folder / "train.py").write_text(SENDS_LATE)
        options = ("--world-size", "2", "--rank", "0,1", "--device", "virtual", "--until", "end", "--no-kernels")
        finished = run_fakedist("profile", *options, "-o", "runs", "--no-page", "train.py", cwd=folder)
        assert finished.code == 0, finished.stderr

    found = run_fakedist("match", made_once(SENDS_LATE, make) / "runs", "--json")
    assert found.code == 5
    printed = json.loads(found.stdout)
    assert [(wait["operation"], wait["for_ranks"]) for wait in printed["waiting"]] == [
        ("all_reduce", [1]),
        ("recv", [0]),
    ]
    assert (printed["unknown_waits"], printed["waits_between_streams"]) == (0, "none")
