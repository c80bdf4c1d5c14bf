import dataclasses
import os

import pytest

from fakedist.options import Job
from fakedist.world.environ import rank_environment


@pytest.fixture(autouse=True)
def _no_threads_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.delenv(name, raising=False)


def environment(**job: object) -> dict[str, str]:
    return rank_environment(Job(**{"world_size": 1024, "rank": 517, "target": "x", **job}))  # type: ignore[arg-type]


def test_torchrun() -> None:
    assert environment() == {
        "RANK": "517",
        "LOCAL_RANK": "5",
        "WORLD_SIZE": "1024",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "64",
        "GROUP_WORLD_SIZE": "128",
        "ROLE_NAME": "default",
        "ROLE_RANK": "517",
        "ROLE_WORLD_SIZE": "1024",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_accelerate() -> None:
    found = environment(launcher="accelerate", gpus_per_node=1)
    assert found == {
        **environment(gpus_per_node=1),
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "OMP_NUM_THREADS": "1",
    }


def test_deepspeed() -> None:
    assert environment(launcher="deepspeed", world_size=12, rank=9) == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "12",
        "LOCAL_SIZE": "4",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_deepspeed_tells_the_script_its_local_rank() -> None:
    job = Job(world_size=16, rank=9, target="x", arguments=("--lr", "1"), launcher="deepspeed")
    assert job.script_arguments == ("--local_rank=1", "--lr", "1")
    assert dataclasses.replace(job, device="cuda").script_arguments[0] == "--local_rank=0"
    assert dataclasses.replace(job, launcher="torchrun").script_arguments == ("--lr", "1")


def test_the_users_own_thread_count_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in environment()


def test_one_rank_a_machine_keeps_its_threads() -> None:
    assert "OMP_NUM_THREADS" not in environment(gpus_per_node=1)


@pytest.mark.parametrize(
    ("job", "local_rank", "local_size", "node", "nodes"),
    [
        ({"world_size": 1, "rank": 0}, 0, 1, 0, 1),
        ({"world_size": 8, "rank": 7}, 7, 8, 0, 1),
        ({"world_size": 12, "rank": 9}, 1, 4, 1, 2),
        ({"world_size": 16, "rank": 9, "gpus_per_node": 4}, 1, 4, 2, 4),
    ],
    ids=str,
)
def test_the_ranks_place_on_its_machine(
    job: dict[str, int], local_rank: int, local_size: int, node: int, nodes: int
) -> None:
    told = environment(**job)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [int(told[name]) for name in names] == [local_rank, local_size, node, nodes]


def test_slurm() -> None:
    told = environment(launcher="slurm")
    assert "RANK" not in told
    assert (told["SLURM_PROCID"], told["SLURM_LOCALID"], told["SLURM_NODEID"]) == ("517", "5", "64")
    assert (told["SLURM_NTASKS"], told["SLURM_NNODES"]) == ("1024", "128")
    assert told["SLURM_TASKS_PER_NODE"] == "8(x128)"
    assert (told["SLURM_JOB_NODELIST"], told["SLURMD_NODENAME"]) == ("node[0-127]", "node64")
    assert told["MASTER_PORT"] == "29500"
    assert environment(launcher="slurm", world_size=4, rank=0)["SLURM_NODELIST"] == "node0"


def test_mpi() -> None:
    told = environment(launcher="mpi")
    assert "RANK" not in told
    assert (told["OMPI_COMM_WORLD_RANK"], told["OMPI_COMM_WORLD_SIZE"]) == ("517", "1024")
    assert (told["OMPI_COMM_WORLD_LOCAL_RANK"], told["OMPI_COMM_WORLD_LOCAL_SIZE"]) == ("5", "8")
    assert (told["PMI_RANK"], told["MPI_LOCALRANKID"]) == ("517", "5")
    assert told["MASTER_ADDR"] == "127.0.0.1"


def test_asking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    environment()
    assert dict(os.environ) == before
