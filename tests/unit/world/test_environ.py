import dataclasses
import os

import pytest

from fakedist.options import Job
from fakedist.world.environ import rank_environment

RENDEZVOUS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)


def environment(**job: object) -> dict[str, str]:
    return rank_environment(Job(**{"world_size": 1024, "rank": 517, "target": "x", **job}))  # type: ignore[arg-type]


def test_torchrun() -> None:
    before = dict(os.environ)
    assert environment() == RENDEZVOUS | {
        "RANK": "517",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "1024",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "64",
        "GROUP_WORLD_SIZE": "128",
        "ROLE_NAME": "default",
        "ROLE_RANK": "517",
        "ROLE_WORLD_SIZE": "1024",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert dict(os.environ) == before


def test_accelerate() -> None:
    assert environment(launcher="accelerate", gpus_per_node=1) == environment(gpus_per_node=1) | {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        **dict.fromkeys(
            (f"ACCELERATE_DYNAMO_USE_{what}" for what in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION")), "False"
        ),
        "OMP_NUM_THREADS": "1",
    }


def test_deepspeed() -> None:
    assert environment(launcher="deepspeed", world_size=12, rank=9) == RENDEZVOUS | {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "12",
        "LOCAL_SIZE": "4",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    job = Job(world_size=16, rank=9, target="x", arguments=("--lr", "1"), launcher="deepspeed")
    assert job.script_arguments == ("--local_rank=1", "--lr", "1")
    assert dataclasses.replace(job, device="cuda").script_arguments[0] == "--local_rank=0"
    assert dataclasses.replace(job, launcher="torchrun").script_arguments == ("--lr", "1")


def test_the_users_own_thread_count_stays_and_so_do_the_threads_of_one_rank_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "OMP_NUM_THREADS" not in environment(gpus_per_node=1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in environment()


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({"world_size": 1, "rank": 0}, [0, 1, 0, 1]),
        ({"world_size": 8, "rank": 7}, [7, 8, 0, 1]),
        ({"world_size": 12, "rank": 9}, [1, 4, 1, 2]),
        ({"world_size": 16, "rank": 9, "gpus_per_node": 4}, [1, 4, 2, 4]),
    ],
    ids=str,
)
def test_the_ranks_place_on_its_machine(job: dict[str, int], expected: list[int]) -> None:
    found = environment(**job)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [int(found[name]) for name in names] == expected


def test_slurm_and_mpi() -> None:
    found = environment(launcher="slurm")
    assert "RANK" not in found
    assert (
        found.items()
        >= (
            RENDEZVOUS
            | {"SLURM_PROCID": "517", "SLURM_LOCALID": "5", "SLURM_NODEID": "64", "SLURM_NTASKS": "1024"}
            | {"SLURM_NNODES": "128", "SLURM_TASKS_PER_NODE": "8(x128)"}
            | {"SLURM_JOB_NODELIST": "node[0-127]", "SLURMD_NODENAME": "node64"}
        ).items()
    )
    assert environment(launcher="slurm", world_size=4, rank=0)["SLURM_NODELIST"] == "node0"
    found = environment(launcher="mpi")
    assert "RANK" not in found
    of_mpi = {"RANK": "517", "SIZE": "1024", "LOCAL_RANK": "5", "LOCAL_SIZE": "8"}
    assert found.items() >= {f"OMPI_COMM_WORLD_{name}": value for name, value in of_mpi.items()}.items()
    assert found.items() >= ({"PMI_RANK": "517", "MPI_LOCALRANKID": "5"} | RENDEZVOUS).items()
