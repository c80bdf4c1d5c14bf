from __future__ import annotations

import os

import pytest

from fakedist.errors import JobError
from fakedist.options import Door, JobProgram, make_jobs, world_from_environment

PROGRAM = JobProgram("train.py")


def test_world_size_and_rank_are_taken_from_the_launchers_environment() -> None:
    for environ, place in (
        ({}, (None, None)),
        ({"WORLD_SIZE": "8", "RANK": "3"}, (8, 3)),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "4"}, (16, 4)),
        ({"OMPI_COMM_WORLD_SIZE": "32", "OMPI_COMM_WORLD_RANK": "5"}, (32, 5)),
        ({"WORLD_SIZE": "8", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (8, 0)),
    ):
        assert world_from_environment(environ) == place
    with pytest.raises(JobError, match="WORLD_SIZE=many"):
        world_from_environment({"WORLD_SIZE": "many"})


@pytest.mark.parametrize("door", Door)
def test_nodes_and_gpus_per_node_give_the_world_size(door: Door) -> None:
    (job,) = make_jobs(PROGRAM, {"nnodes": 128, "gpus_per_node": 8}, door)
    assert (job.world_size, job.gpus_per_node, job.num_nodes) == (1024, 8, 128)
    assert make_jobs(PROGRAM, {"nnodes": 128, "gpus_per_node": 8, "world_size": 1024}, door) == (job,)


NODES = {"nnodes": 128, "gpus_per_node": 8, "world_size": 1000}
CONTRADICTION = "--world-size 1000 contradicts --nnodes 128 --gpus-per-node 8, which have 1024 ranks"
NO_STEPS = {"world_size": 8, "steps": 0}


@pytest.mark.parametrize(
    ("door", "given", "told", "hint"),
    [
        (Door.COMMAND_LINE, NODES, CONTRADICTION, "leave out --world-size"),
        (Door.COMMAND_LINE, {"nnodes": 4}, "--nnodes 4 needs the GPUs per node", "--nnodes 4 --gpus-per-node 8"),
        (
            Door.COMMAND_LINE,
            {},
            "how many ranks does the job have?",
            "--world-size 1024, or WORLD_SIZE in the environment",
        ),
        (Door.COMMAND_LINE, NO_STEPS, "--steps must be 1 or more, not 0", "--steps 3"),
        (Door.TOML, NO_STEPS, "steps must be 1 or more, not 0", "steps = 3"),
        (Door.PYTHON, NO_STEPS, "steps must be 1 or more, not 0", "steps=3"),
    ],
)
def test_an_error_is_one_line_in_the_names_of_its_door(
    door: Door, given: dict[str, object], told: str, hint: str
) -> None:
    with pytest.raises(JobError) as error:
        make_jobs(PROGRAM, given, door)
    assert (error.value.message, error.value.hint) == (told, hint)


def test_an_option_that_does_not_exist_is_likened_to_one_that_does() -> None:
    with pytest.raises(JobError, match="a job has no option 'kernel'") as error:
        make_jobs(PROGRAM, {"world_size": 8, "kernel": False}, Door.PYTHON)
    assert error.value.hint == "did you mean 'kernels'?"


def test_paths_of_runs_are_absolute() -> None:
    (job,) = make_jobs(PROGRAM, {"world_size": 8, "tapes": ["runs", "/other"]}, Door.TOML, "/project")
    assert job.tapes == ("/project/runs", "/other")
    (job,) = make_jobs(PROGRAM, {"world_size": 8, "tapes": "runs"}, Door.PYTHON)
    assert job.tapes == (os.path.abspath("runs"),)


def test_each_rank_has_a_job_of_its_own() -> None:
    jobs = make_jobs(PROGRAM, {"world_size": 16, "rank": "0-12:4"}, Door.COMMAND_LINE)
    assert [job.rank for job in jobs] == [0, 4, 8, 12]
    with pytest.raises(JobError, match="rank 16 does not exist in a world of 16"):
        make_jobs(PROGRAM, {"world_size": 16, "rank": "0,16"}, Door.COMMAND_LINE)
