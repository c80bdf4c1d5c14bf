"""The environment that a launcher would set for the rank."""

from __future__ import annotations

import os

from fakedist.options import Job

MASTER_ADDR = "127.0.0.1"
MASTER_PORT = "29500"
JOB_ID = "1"
#: torchrun's --rdzv-id; for a static rendezvous it is "none" (torch/distributed/run.py).
RUN_ID = "none"


def rank_environment(job: Job) -> dict[str, str]:
    """Variables that ``job.launcher`` sets for the rank.

    torchrun's are those of torch/distributed/elastic/agent/server/local_elastic_agent.py, one agent per node. srun and
    mpirun get MASTER_ADDR too, as sbatch scripts set it. ``accelerate launch --multi_gpu`` and ``deepspeed`` are taken
    without a configuration file; ``--env`` adds more.
    """
    variables = {"accelerate": _accelerate, "deepspeed": _deepspeed, "slurm": _slurm, "mpi": _mpi}
    return {name: str(value) for name, value in ({**variables.get(job.launcher, _torchrun)(job), **_MASTER}).items()}


_Variables = dict[str, str | int]
_MASTER = {"MASTER_ADDR": MASTER_ADDR, "MASTER_PORT": MASTER_PORT}


def _torchrun(job: Job) -> _Variables:
    environment: _Variables = {
        "RANK": job.rank,
        "LOCAL_RANK": job.device_index,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.local_world_size,
        "GROUP_RANK": job.node_rank,
        "GROUP_WORLD_SIZE": job.num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": job.rank,
        "ROLE_WORLD_SIZE": job.world_size,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": RUN_ID,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if job.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = 1  # torchrun's default on a node with more than one rank
    return environment


def _accelerate(job: Job) -> _Variables:
    """prepare_multi_gpu_env in accelerate/utils/launch.py (1.15), on top of torchrun."""
    return {
        **_torchrun(job),
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _deepspeed(job: Job) -> _Variables:
    """deepspeed/launcher/launch.py (0.19), one launcher per node."""
    return {
        "RANK": job.rank,
        "LOCAL_RANK": job.device_index,
        "WORLD_SIZE": job.world_size,
        "LOCAL_SIZE": job.local_world_size,
        "CROSS_RANK": job.node_rank,
        "CROSS_SIZE": job.num_nodes,
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(job.local_world_size)),
        "PYTORCH_NVML_BASED_CUDA_CHECK": 1,  # set when deepspeed is imported
    }


def _slurm(job: Job) -> _Variables:
    return {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOBID": JOB_ID,
        "SLURM_PROCID": job.rank,
        "SLURM_LOCALID": job.device_index,
        "SLURM_NODEID": job.node_rank,
        "SLURM_NTASKS": job.world_size,
        "SLURM_NPROCS": job.world_size,
        "SLURM_NTASKS_PER_NODE": job.gpus_per_node,
        "SLURM_TASKS_PER_NODE": f"{job.gpus_per_node}(x{job.num_nodes})" if job.num_nodes > 1 else job.local_world_size,
        "SLURM_NNODES": job.num_nodes,
        "SLURM_JOB_NUM_NODES": job.num_nodes,
        "SLURM_NODELIST": _nodes(job),
        "SLURM_JOB_NODELIST": _nodes(job),
        "SLURMD_NODENAME": f"node{job.node_rank}",
        "SLURM_GPUS_ON_NODE": job.gpus_per_node,
    }


def _nodes(job: Job) -> str:
    return "node0" if job.num_nodes == 1 else f"node[0-{job.num_nodes - 1}]"


def _mpi(job: Job) -> _Variables:
    return {
        "OMPI_COMM_WORLD_RANK": job.rank,
        "OMPI_COMM_WORLD_SIZE": job.world_size,
        "OMPI_COMM_WORLD_LOCAL_RANK": job.device_index,
        "OMPI_COMM_WORLD_LOCAL_SIZE": job.local_world_size,
        "OMPI_COMM_WORLD_NODE_RANK": job.device_index,
        "OMPI_UNIVERSE_SIZE": job.world_size,
        "PMI_RANK": job.rank,
        "PMI_SIZE": job.world_size,
        "MPI_LOCALRANKID": job.device_index,
        "MPI_LOCALNRANKS": job.local_world_size,
    }
