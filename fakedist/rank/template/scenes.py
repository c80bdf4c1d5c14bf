"""Compares the scene of a rank's import with the one in which the template imported the same module."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fakedist.gpu.smi.nvidia_smi import VARIABLE
from fakedist.rank.template.learned import Scene

#: Variables that launchers set for each rank. A process group reads them when it begins, and torch's import does not.
#: One that a module did read while it was imported counts nonetheless (:mod:`fakedist.rank.template.recording`).
OF_RANKS = frozenset(
    {
        # torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py)
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        "TORCHELASTIC_USE_AGENT_STORE",
        # deepspeed, srun, mpirun
        *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"),
        *("SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURMD_NODENAME"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *("OMPI_COMM_WORLD_NODE_RANK", "OMPI_UNIVERSE_SIZE", "PMI_RANK", "PMI_SIZE"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        # The driver reads it in cuInit, and torch.cuda each time it counts devices.
        "CUDA_VISIBLE_DEVICES",
        VARIABLE,  # what the stand-in of nvidia-smi reads
    }
)


def difference(here: Scene, there: Scene, read: Collection[str]) -> str:
    """What tells two scenes apart, in words. Empty if imports cannot tell.

    Args:
        here: The rank's scene.
        there: The template's.
        read: Variables of :data:`OF_RANKS` that count because a module read them while it was imported.
    """
    if name := differing_variable(here.environment, there.environment, read):
        return name
    return "" if here.path == there.path else "sys.path"


def differing_variable(here: Mapping[str, str], there: Mapping[str, str], read: Collection[str] = ()) -> str:
    """The first variable that differs and that an import may go by. Empty if there is none."""
    names = sorted(here.keys() | there.keys())
    return next((each for each in names if _counts(each, read) and here.get(each) != there.get(each)), "")


def _counts(name: str, read: Collection[str]) -> bool:
    return name in read or name not in OF_RANKS
