"""The job: which rank of which world runs which script, on which device. Validated once, here."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fakedist.errors import JobError
from fakedist.units import UNLIMITED_BYTES

__all__ = ["UNLIMITED_BYTES", "Collectives", "Device", "Job", "Launcher", "Until", "Values"]

Device = Literal["cuda", "virtual"]
Launcher = Literal["torchrun", "slurm", "mpi", "accelerate", "deepspeed"]
Collectives = Literal["values", "noop"]
Values = Literal["small", "strict", "off"]
Until = Literal["validation", "save", "end"]

#: The virtual GPU's driver has room for this many devices on one node.
MAX_GPUS_PER_NODE = 128
#: Below this the CUDA context and one cuBLAS workspace would not fit.
MIN_GPU_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True)
class Job:
    """One rank of a job.

    Attributes:
        world_size: Ranks in the whole job.
        rank: The rank that runs.
        target: Path of the script, or name of the module.
        is_module: Whether ``target`` is a module, as with ``python -m``.
        arguments: The script's own arguments.
        gpus_per_node: GPUs (and so ranks) on each node of the job.
        device: "cuda" for the real GPU, "virtual" for the virtual one.
        gpu: Model of the virtual GPU, a key of ``gpu.spec.GPUS``.
        gpu_memory_bytes: Memory of the virtual GPU; None for the model's own, UNLIMITED_BYTES for no limit.
        steps: Training steps to run before the run stops; "auto" runs until a step ends with as much live memory as
            the step before, at least 2 steps and at most 6.
        until: What stops the run instead: a number of steps, the first "validation" or "save" after training began, or
            the script's own "end"; None to stop after ``steps``.
        launcher: The launcher whose environment variables the script sees.
        collectives: "values" fills in what would have arrived; "noop" moves nothing.
        values: On the virtual GPU, "small" computes small tensors for real and makes up what no kernel computed,
            "strict" fails instead of making values up, "off" computes nothing.
        kernels: Whether to time the kernels of one step: measured on a real GPU, estimated on the virtual one.
        environment: Variables set last; they override everything else.
        nccl_environment: NCCL's variables as on the cluster, for the script and for the estimate of NCCL's memory.
        timeout_s: Seconds after which the script is stopped; None for no limit.
        seed: Seed of every made-up value.
        tapes: Run directories of other ranks, or directories of these, whose tapes supply what those ranks send.
        nsys: Further arguments for ``nsys profile``, which then runs the rank and measures that step; None to run
            without it.
        with_peers: Whether to also run the ranks whose objects this rank waits for, and receive from their tapes.

    Raises:
        JobError: A value is invalid.
    """

    world_size: int
    rank: int
    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    gpus_per_node: int = 8
    device: Device = "virtual"
    gpu: str = "h100-80g"
    gpu_memory_bytes: int | None = None
    steps: int | Literal["auto"] = "auto"
    until: int | Until | None = None
    launcher: Launcher = "torchrun"
    collectives: Collectives = "values"
    values: Values = "small"
    kernels: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    nccl_environment: tuple[tuple[str, str], ...] = ()
    timeout_s: float | None = None
    seed: int = 0
    tapes: tuple[str, ...] = ()
    nsys: tuple[str, ...] | None = None
    with_peers: bool = False

    def __post_init__(self) -> None:
        for name, option in (("world_size", "--world-size"), ("gpus_per_node", "--gpus-per-node")):
            if getattr(self, name) < 1:
                raise JobError(
                    f"{option} must be 1 or more, not {getattr(self, name)}", f"give {option} a positive number"
                )
        self._check_length()
        if not 0 <= self.rank < self.world_size:
            raise JobError(
                f"rank {self.rank} does not exist in a world of {self.world_size}",
                f"ranks go from 0 to {self.world_size - 1}: --rank 0",
            )
        if self.gpus_per_node > MAX_GPUS_PER_NODE:
            raise JobError(
                f"--gpus-per-node is at most {MAX_GPUS_PER_NODE}, not {self.gpus_per_node}", "--gpus-per-node 8"
            )
        for name, choices in (
            ("device", Device),
            ("launcher", Launcher),
            ("collectives", Collectives),
            ("values", Values),
        ):
            if getattr(self, name) not in get_args(choices):
                raise JobError(f"--{name} is one of {', '.join(get_args(choices))}, not {getattr(self, name)!r}")
        if self.gpu_memory_bytes is not None and self.gpu_memory_bytes < MIN_GPU_MEMORY_BYTES:
            raise JobError(
                f"a GPU with {self.gpu_memory_bytes} bytes of memory cannot even start", "--gpu-memory 80GiB"
            )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise JobError(f"--timeout must be more than 0 seconds, not {self.timeout_s}", "--timeout 600")

    def _check_length(self) -> None:
        """Check that ``steps`` and ``until`` are valid."""
        for option, value, words in (
            ("--steps", self.steps, ("auto",)),
            ("--until", 1 if self.until is None else self.until, get_args(Until)),
        ):
            is_number = isinstance(value, int) and not isinstance(value, bool)
            if value not in words and not is_number:
                known = ", ".join(words)
                raise JobError(f"{option} is a number of steps or {known}, not {value!r}", f"{option} {words[0]}")
            if isinstance(value, int) and value < 1:
                raise JobError(f"{option} must be 1 or more, not {value}", f"give {option} a positive number")
        if isinstance(self.steps, int) and isinstance(self.until, int) and self.steps != self.until:
            raise JobError(f"--steps {self.steps} and --until {self.until} contradict each other", "give one of them")

    @property
    def node_rank(self) -> int:
        """Number of the node that the rank runs on."""
        return self.rank // self.gpus_per_node

    @property
    def num_nodes(self) -> int:
        """Nodes in the job; the last one may not be full."""
        return -(-self.world_size // self.gpus_per_node)

    @property
    def local_rank(self) -> int:
        """The rank's number on its node in the real job."""
        return self.rank % self.gpus_per_node

    @property
    def local_world_size(self) -> int:
        """Ranks on the rank's node."""
        return min(self.gpus_per_node, self.world_size - self.node_rank * self.gpus_per_node)

    @property
    def device_index(self) -> int:
        """Value of LOCAL_RANK: 0 on the one real GPU, the true local rank on virtual GPUs."""
        return 0 if self.device == "cuda" else self.local_rank

    @property
    def script_arguments(self) -> tuple[str, ...]:
        """The script's ``sys.argv[1:]``. DeepSpeed's launcher puts the local rank before the script's arguments."""
        own = (f"--local_rank={self.device_index}",) if self.launcher == "deepspeed" else ()
        return (*own, *self.arguments)

    def to_dict(self) -> dict[str, Any]:
        """The job as plain values, for run.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Job:
        """Rebuild the job from :meth:`to_dict`'s values; JSON's lists become tuples again."""
        known = {field.name for field in dataclasses.fields(cls)}
        chosen = {name: value for name, value in values.items() if name in known}
        for name in ("arguments", "tapes"):
            chosen[name] = tuple(chosen.get(name, ()))
        chosen["nsys"] = None if chosen.get("nsys") is None else tuple(chosen["nsys"])
        for field in ("environment", "nccl_environment"):
            chosen[field] = tuple((name, value) for name, value in chosen.get(field, ()))
        return cls(**chosen)


def profile_arguments(job: Job, ranks: str = "") -> list[str]:
    """Arguments of ``fakedist profile`` that run the job, or other ranks of it ("0,4").

    They include every option of the job. The run's directory and how it is printed are not part of the job.
    """
    found = [f"--world-size={job.world_size}", f"--rank={ranks or job.rank}"]
    found += [f"--device={job.device}", f"--steps={job.steps}"]
    if job.until is not None:
        found.append(f"--until={job.until}")
    plain = Job(world_size=job.world_size, rank=job.rank, target=job.target)
    found += [
        f"--{name.replace('_', '-')}={getattr(job, name)}"
        for name in ("gpus_per_node", "gpu", "launcher", "collectives", "values", "seed")
        if getattr(job, name) != getattr(plain, name)
    ]
    if job.gpu_memory_bytes is not None:
        found.append(f"--gpu-memory={job.gpu_memory_bytes}B")
    if job.timeout_s is not None:
        found.append(f"--timeout={job.timeout_s}")
    found += [f"--env={name}={value}" for name, value in job.environment]
    found += [f"--nccl-env={name}={value}" for name, value in job.nccl_environment]
    found += [f"--tape={tape}" for tape in job.tapes]
    found += [] if job.kernels else ["--no-kernels"]
    if job.nsys is not None:
        found += ["--nsys", *([f"--nsys-args={shlex.join(job.nsys)}"] if job.nsys else [])]
    if job.with_peers:
        found.append("--with-peers")
    return [*found, *(["-m"] if job.is_module else []), job.target, *job.arguments]


def profile_command(job: Job, ranks: Sequence[int] = ()) -> str:
    """The complete shell command that runs the job, or other ranks of it."""
    return shlex.join(["fakedist", "profile", *profile_arguments(job, ",".join(map(str, ranks)))])


def place_from_environment(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
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


def parse_length(text: str) -> int | str:
    """Return a number of steps as an integer, and a word ("auto", "validation") unchanged; :class:`Job` checks it."""
    return int(text) if text.removeprefix("-").isdecimal() else text
