"""Makes jobs from the options that a user gave, at whichever door."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from fakedist.errors import JobError, did_you_mean
from fakedist.gpu.models.spec import GPU_FILE_ENDING
from fakedist.options.definition import (
    NNODES,
    OPTIONS,
    Collectives,
    Device,
    GpuLag,
    Job,
    Launcher,
    OutOfMemoryPolicy,
    Until,
    Values,
)
from fakedist.options.expert_loads import FILE_ENDING, lines_of
from fakedist.options.kinds import Door, Option

_BY_NAME = {option.name: option for option in OPTIONS}
_WORLD_SIZE, _GPUS_PER_NODE = _BY_NAME["world_size"], _BY_NAME["gpus_per_node"]


class JobOptions(TypedDict, total=False):
    """The options of a job as Python's keywords, without ``world_size`` and ``rank``. A test holds it complete."""

    nnodes: int
    gpus_per_node: int
    launcher: Launcher
    env: Mapping[str, str]
    nccl_env: Mapping[str, str]
    tapes: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    with_peers: bool
    device: Device
    gpu: str
    gpu_memory: str
    reserve: str
    host_memory: str
    storage: str
    oom: OutOfMemoryPolicy
    gpu_lag: GpuLag
    gpu_power: float
    fabric: str
    host: str
    collectives: Collectives
    values: Values
    seed: int
    router_load: str
    steps: int | Literal["auto"]
    until: int | Until
    updates_per_step: int
    timeout: float
    kernels: bool
    clock_run: bool
    page: bool
    times: str
    nsys: bool
    nsys_args: str | Sequence[str]


@dataclass(frozen=True, slots=True)
class JobProgram:
    """The script or module that each rank runs.

    Attributes:
        target: Path of the script, or name of the module.
        is_module: Whether it is a module, as with ``python -m``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def make_jobs(program: JobProgram, plain: Mapping[str, object], door: Door, directory: str = "") -> tuple[Job, ...]:
    """Make the job of each rank that the options name: rank 0 if they name none.

    Args:
        plain: Plain values by the options' names. None means that the option was not given.
        door: The source of the options. Errors use its names.
        directory: The directory to which paths of runs are relative. Empty for the current one.

    Raises:
        JobError: An option does not exist, a value is invalid, or two options contradict each other.
    """
    for name in plain:
        if name not in _BY_NAME:
            raise JobError(f"a job has no option {name!r}", did_you_mean(name, _BY_NAME))
    stored = {
        option.field or option.name: option.read(plain[option.name], door)
        for option in OPTIONS
        if plain.get(option.name) is not None
    }
    stored["world_size"] = _world_size(stored, door)
    ranks = stored.pop("rank", (0,))
    assert isinstance(ranks, tuple)
    stored |= {"target": program.target, "is_module": program.is_module, "arguments": program.arguments}
    first = Job.from_dict({**stored, "rank": ranks[0]})
    if first.tapes:
        tapes = tuple(os.path.abspath(os.path.join(directory, tape)) for tape in first.tapes)
        first = dataclasses.replace(first, tapes=tapes)
    if first.gpu.lower().endswith(GPU_FILE_ENDING):  # the rank starts elsewhere, and may change its directory
        first = dataclasses.replace(first, gpu=os.path.abspath(os.path.join(directory, first.gpu)))
    if first.fabric is not None and first.fabric.endswith(".toml"):
        first = dataclasses.replace(first, fabric=os.path.abspath(os.path.join(directory, first.fabric)))
    if first.host is not None and first.host.endswith(".toml"):
        first = dataclasses.replace(first, host=os.path.abspath(os.path.join(directory, first.host)))
    if first.router_load.endswith(FILE_ENDING):
        first = dataclasses.replace(first, router_load=os.path.abspath(os.path.join(directory, first.router_load)))
        lines_of(first.router_load)  # before anything runs
    if first.times:
        first = dataclasses.replace(first, times=os.path.abspath(os.path.join(directory, first.times)))
    return (first, *(dataclasses.replace(first, rank=rank) for rank in ranks[1:]))


def _world_size(stored: dict[str, object], door: Door) -> object:
    size, nodes, per_node = stored.get("world_size"), stored.pop("nnodes", None), stored.get("gpus_per_node")
    if nodes is None:
        if size is None:
            hint = _WORLD_SIZE.written(door, _WORLD_SIZE.example)
            if door is Door.COMMAND_LINE:
                hint += ", or WORLD_SIZE in the environment"
            raise JobError("how many ranks does the job have?", hint)
        return size
    spelled = NNODES.written(door, nodes)
    if per_node is None:
        raise JobError(f"{spelled} needs the GPUs per node", f"{spelled}{_and(door)}{_GPUS_PER_NODE.written(door, 8)}")
    assert isinstance(nodes, int)
    assert isinstance(per_node, int)
    if size is not None and size != nodes * per_node:
        raise JobError(
            f"{_WORLD_SIZE.written(door, size)} contradicts {spelled}{_and(door)}"
            f"{_GPUS_PER_NODE.written(door, per_node)}, which have {nodes * per_node} ranks",
            f"leave out {_WORLD_SIZE.called(door)}",
        )
    return nodes * per_node


def _and(door: Door) -> str:
    return " " if door is Door.COMMAND_LINE else ", "


def option_named(name: str) -> Option:
    """The option of this name."""
    return _BY_NAME[name]


def world_from_environment(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """World size and rank as torchrun, SLURM or Open MPI set them in the environment; None if not set.

    Raises:
        JobError: A variable is not a number.
    """
    size = _first_number(environ, "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    rank = _first_number(environ, "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return size, rank


def _first_number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        if text := environ.get(name):
            try:
                return int(text)
            except ValueError:
                raise JobError(
                    f"{name}={text} in the environment is not a number", "--world-size 1024 --rank 0"
                ) from None
    return None
