from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fakedist.errors import JobError
from fakedist.options import Job
from fakedist.units import UNLIMITED_BYTES

JOB = Job(world_size=1024, rank=13, target="train.py")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"world_size": 0}, "--world-size must be 1 or more"),
        ({"world_size": -8}, "--world-size must be 1 or more"),
        ({"rank": 1024}, "rank 1024 does not exist in a world of 1024"),
        ({"rank": -1}, "rank -1 does not exist"),
        ({"gpus_per_node": 0}, "--gpus-per-node must be 1 or more"),
        ({"gpus_per_node": 129}, "--gpus-per-node is at most 128"),
        ({"steps": 0}, "--steps must be 1 or more"),
        ({"device": "tpu"}, "--device is one of cuda, virtual"),
        ({"launcher": "ssh"}, "--launcher is one of"),
        ({"gpu_memory_bytes": 1}, "--gpu-memory must be 64.00 MiB or more, not 1 B"),
        ({"reserve_bytes": 1 << 30, "device": "cuda"}, "on a real GPU others hold what they do"),
        ({"reserve_bytes": 1 << 30, "gpu_memory_bytes": UNLIMITED_BYTES}, "unlimited memory less what others hold"),
        ({"reserve_bytes": 1 << 30, "gpu_memory_bytes": 1 << 30}, "reserve leaves PyTorch less than 64.00 MiB"),
        ({"reserve_bytes": 80 << 30, "gpu": "h100-80g"}, "reserve leaves PyTorch less than 64.00 MiB"),
        ({"timeout_s": 0.0}, "--timeout must be more than 0"),
        ({"timeout_s": float("nan")}, "--timeout must be more than 0"),
        ({"steps": 3, "until": 4}, "3 steps and until step 4 contradict each other"),
        ({"nsys_args": ("--trace=osrt",)}, "arguments for nsys are given"),
        ({"times": "/own.json", "device": "cuda"}, "on a real GPU kernels are measured"),
        ({"clock_run": True, "device": "cuda"}, "measures the host of an estimated step"),
        ({"clock_run": True, "nsys": True}, "measures the host of an estimated step"),
        ({"clock_run": True, "kernels": False}, "measures the host of an estimated step"),
    ],
)
def test_a_job_that_makes_no_sense_is_refused_with_one_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError) as error:
        dataclasses.replace(JOB, **change)
    assert told in error.value.message
    assert "\n" not in error.value.message
    assert error.value.exit_code == 2


def test_a_rank_knows_its_place_on_its_machine_of_which_the_last_may_not_be_full() -> None:
    assert (JOB.node_rank, JOB.local_rank, JOB.local_world_size, JOB.num_nodes) == (1, 5, 8, 128)
    job = Job(world_size=12, rank=9, target="train.py")
    assert (job.num_nodes, job.local_rank, job.local_world_size) == (2, 1, 4)
    # The one real GPU is number 0; virtual ones have their true number.
    assert dataclasses.replace(JOB, device="cuda").device_index == 0
    assert dataclasses.replace(JOB, device="virtual").device_index == 5


def test_a_job_comes_back_from_json_also_of_a_newer_version() -> None:
    variables: dict[str, Any] = {"environment": (("A", "b=c"),), "nccl_environment": (("NCCL_ALGO", "Ring"),)}
    job = dataclasses.replace(
        JOB, arguments=("--lr", "1"), gpu_memory_bytes=UNLIMITED_BYTES, timeout_s=1.5, **variables
    )
    assert Job.from_dict({**json.loads(json.dumps(job.to_dict())), "added_later": 1}) == job
