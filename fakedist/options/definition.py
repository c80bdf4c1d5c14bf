"""The job: which rank of which world runs which script, on which device. Each option of it is declared here, once."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import GPUS
from fakedist.options import kinds
from fakedist.options.expert_loads import EVEN
from fakedist.options.kinds import Door, Option, OptionGroup, RefusedError, declared, named, options_of
from fakedist.units import MAX_RANKS, UNLIMITED_BYTES, format_bytes

Device = Literal["cuda", "virtual"]
Launcher = Literal["torchrun", "slurm", "mpi", "accelerate", "deepspeed"]
Collectives = Literal["values", "noop"]
Values = Literal["small", "strict", "off"]
Until = Literal["validation", "save", "end"]
OutOfMemoryPolicy = Literal["continue", "raise"]
GpuLag = Literal["none", "full"]

#: The virtual GPU's driver has room for this many devices on one node.
MAX_GPUS_PER_NODE = 128
#: Below this the CUDA context and one cuBLAS workspace would not fit.
MIN_GPU_MEMORY_BYTES = 64 << 20

#: Gives the world size together with ``gpus_per_node``, as torchrun's option of this name does.
NNODES = named(
    Option(
        name="nnodes",
        kind=kinds.whole_number(least=1, most=MAX_RANKS),
        group=OptionGroup.JOB,
        help="Nodes of the job, instead of the world size. Needs the GPUs per node.",
        example=128,
    )
)
NCCL_ENVIRONMENT = Option(
    name="nccl_env",
    kind=kinds.variables(),
    group=OptionGroup.JOB,
    help="Set a variable of NCCL as on the cluster. Estimates of NCCL's memory and time follow it. Repeatable.",
    example={"NCCL_MAX_NCHANNELS": "8"},
)
GPU = Option(
    kind=kinds.plain_text(),
    group=OptionGroup.DEVICE,
    help="GPU model, a GPU file (my_gpu.toml), or list to print the models.",
    metavar="MODEL",
    example="h200",
)
GPU_POWER = Option(
    name="gpu_power",
    kind=kinds.number(least=10, most=10_000, metavar="WATTS", unit="watts", suffix="W"),
    group=OptionGroup.DEVICE,
    help="Power limit of the GPU in watts. Estimated times follow it.",
    default_text="the model's",
    example=500,
)
FABRIC = Option(
    kind=kinds.plain_text(),
    group=OptionGroup.DEVICE,
    help="Interconnect that collectives are estimated for: a preset such as p5-efa, a fabric file (my_fabric.toml), or "
    "list to print the presets.",
    metavar="NAME",
    default_text="the GPU's usual one",
    example="p5-efa",
)
HOST = Option(
    kind=kinds.plain_text(),
    group=OptionGroup.DEVICE,
    help="Host whose time is estimated: a model such as grace, this (the machine that records), a factor of this "
    "machine's time, a host file (my_host.toml), or list to print the models.",
    metavar="NAME",
    default_text="the GPU's usual one",
    example="grace",
)
ROUTER_LOAD = Option(
    name="router_load",
    kind=kinds.router_load(),
    group=OptionGroup.DEVICE,
    help="Tokens that experts get where a router picks by generated values: even, zipf:S, lognormal:SIGMA, W0 to W7, "
    "or a file of counts (counts.jsonl).",
    example="zipf:0.5",
)


TIMES = Option(
    kind=kinds.plain_text(),
    group=OptionGroup.RECORDING,
    help="Calibration table of your GPU, which `fakedist calibrate` wrote: its times price kernels first.",
    metavar="FILE",
    example="/runs/h100.times.json",
)


@dataclass(frozen=True)
class Job:
    """One rank of a job.

    A field that is not listed here is an option, described where it is declared.

    Attributes:
        rank: The rank that runs.
        target: Path of the script, or name of the module.
        is_module: Whether ``target`` is a module, as with ``python -m``.
        arguments: The script's own arguments.
        environment: Variables set last; they override all others.
        nccl_environment: NCCL's variables as on the cluster, for the script and for the estimate of NCCL's memory.
        tapes: Run directories of other ranks, or directories of these, whose tapes supply what those ranks send.
        gpu: Model of the virtual GPU: a name that ``gpu/models`` knows, or the absolute path of a GPU file.
        gpu_memory_bytes: Memory of the virtual GPU; None for the model's own, UNLIMITED_BYTES for no limit.
        reserve_bytes: What others hold of the virtual GPU's memory; None for nothing.
        host_memory_bytes: Memory of a node's host; None if it is not known.
        storage_bytes_per_s: What a node writes to storage in a second; None if it is not known.
        gpu_power_watts: Power limit of the GPU, for estimated times; None for the model's own.
        until: What stops the run instead: a number of steps, the first "validation" or "save" after training began, or
            the script's own "end"; None to stop after ``steps``.
        timeout_s: Seconds after which the script is stopped; None for no limit.
        nsys_args: More arguments for ``nsys profile``.

    Raises:
        JobError: A value is invalid.
    """

    world_size: int = field(
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=MAX_RANKS),
                group=OptionGroup.JOB,
                help="Ranks in the whole job.",
                default_text="$WORLD_SIZE on the command line",
                example=1024,
            )
        )
    )
    rank: int = field(
        metadata=declared(
            Option(
                kind=kinds.rank_list(),
                group=OptionGroup.JOB,
                help="The rank to run, or several: 0,4,8 or 0-1023:64.",
                toml_key="ranks",
                default_text="$RANK on the command line, otherwise 0",
                example=3,
            )
        )
    )
    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    gpus_per_node: int = field(
        default=8,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1, most=MAX_GPUS_PER_NODE),
                group=OptionGroup.JOB,
                help="GPUs, and so ranks, on each node.",
                flags=("--gpus-per-node", "--nproc-per-node"),
                example=4,
            )
        ),
    )
    launcher: Launcher = field(
        default="torchrun",
        metadata=declared(
            Option(
                kind=kinds.one_of(get_args(Launcher)),
                group=OptionGroup.JOB,
                help="Set the environment variables that this launcher sets.",
                example="slurm",
            )
        ),
    )
    environment: tuple[tuple[str, str], ...] = field(
        default=(),
        metadata=declared(
            Option(
                name="env",
                kind=kinds.variables(),
                group=OptionGroup.JOB,
                help="Set a variable for the script. It overrides all others. Repeatable.",
                example={"OMP_NUM_THREADS": "4"},
            )
        ),
    )
    nccl_environment: tuple[tuple[str, str], ...] = field(default=(), metadata=declared(NCCL_ENVIRONMENT))
    tapes: tuple[str, ...] = field(
        default=(),
        metadata=declared(
            Option(
                name="tapes",
                kind=kinds.run_paths(),
                group=OptionGroup.JOB,
                help="Receive what the ranks of these runs sent. Repeatable.",
                flags=("--tape",),
                example=["/runs/rank0", "/runs/rank 4"],
            )
        ),
    )
    with_peers: bool = field(
        default=False,
        metadata=declared(
            Option(
                kind=kinds.switch(),
                group=OptionGroup.JOB,
                help="Also run the ranks whose objects this rank needs.",
                example=True,
            )
        ),
    )
    device: Device = field(
        default="virtual",
        metadata=declared(
            Option(
                kind=kinds.one_of(get_args(Device)),
                group=OptionGroup.DEVICE,
                help="Run on the real GPU or on the virtual one.",
                default_text="virtual; on the command line cuda, if the machine has a GPU",
                example="cuda",
            )
        ),
    )
    gpu: str = field(default="h100-80g", metadata=declared(GPU))
    gpu_memory_bytes: int | None = field(
        default=None,
        metadata=declared(
            Option(
                name="gpu_memory",
                kind=kinds.memory_size(MIN_GPU_MEMORY_BYTES),
                group=OptionGroup.DEVICE,
                help="Memory of the virtual GPU: 80GiB, 80GB or unlimited.",
                default_text="the model's",
                example="100GiB",
            )
        ),
    )
    reserve_bytes: int | None = field(
        default=None,
        metadata=declared(
            Option(
                name="reserve",
                kind=kinds.memory_size(1 << 20),
                group=OptionGroup.DEVICE,
                help="GPU memory that PyTorch cannot have: the CUDA context, NCCL, other processes. Its allocator "
                "then runs out where it would on the cluster, and its retries are counted and timed.",
                default_text="none",
                example="3GiB",
            )
        ),
    )
    host_memory_bytes: int | None = field(
        default=None,
        metadata=declared(
            Option(
                name="host_memory",
                kind=kinds.memory_size(1 << 20),
                group=OptionGroup.DEVICE,
                help="Memory of a node's host. The report and `fakedist check` say where the node's ranks need more.",
                default_text="not known",
                example="480GiB",
            )
        ),
    )
    storage_bytes_per_s: int | None = field(
        default=None,
        metadata=declared(
            Option(
                name="storage",
                kind=kinds.rate(),
                group=OptionGroup.DEVICE,
                help="What a node writes to storage in a second, for the time of checkpoints: 5GB/s.",
                default_text="not known",
                example="5GB/s",
            )
        ),
    )
    oom: OutOfMemoryPolicy = field(
        default="continue",
        metadata=declared(
            Option(
                kind=kinds.one_of(get_args(OutOfMemoryPolicy)),
                group=OptionGroup.DEVICE,
                help="When the virtual GPU's memory is too small, continue beyond it and report how much the rank "
                "needs, or raise the error as on a real GPU. A script that handles the error always gets it.",
                example="raise",
            )
        ),
    )
    gpu_lag: GpuLag = field(
        default="none",
        metadata=declared(
            Option(
                name="gpu_lag",
                kind=kinds.one_of(get_args(GpuLag)),
                group=OptionGroup.DEVICE,
                help="How far the virtual GPU lags behind its host. none: blocks of record_stream are free at once, "
                "so reserved memory is a lower bound. full: as late as launch queues and the script's waits allow, an "
                "upper bound.",
                example="full",
            )
        ),
    )
    gpu_power_watts: float | None = field(default=None, metadata=declared(GPU_POWER))
    fabric: str | None = field(default=None, metadata=declared(FABRIC))
    host: str | None = field(default=None, metadata=declared(HOST))
    collectives: Collectives = field(
        default="values",
        metadata=declared(
            Option(
                kind=kinds.one_of(get_args(Collectives)),
                group=OptionGroup.DEVICE,
                help="Fill in what other ranks would have sent, or move nothing (noop).",
                example="noop",
            )
        ),
    )
    values: Values = field(
        default="small",
        metadata=declared(
            Option(
                kind=kinds.one_of(get_args(Values)),
                group=OptionGroup.DEVICE,
                help="On the virtual GPU, compute small tensors and generate what no kernel computed (small), fail "
                "instead of generating a value (strict), or compute nothing (off).",
                example="strict",
            )
        ),
    )
    seed: int = field(
        default=0,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=-(1 << 63), most=(1 << 64) - 1),
                group=OptionGroup.DEVICE,
                help="Seed of every generated value.",
                example=7,
            )
        ),
    )
    router_load: str = field(default=EVEN, metadata=declared(ROUTER_LOAD))
    steps: int | Literal["auto"] = field(
        default="auto",
        metadata=declared(
            Option(
                kind=kinds.num_steps_or(("auto",)),
                group=OptionGroup.RECORDING,
                help="Training steps to run. auto: until a step ends with as much memory as the one before, 2 to 6 "
                "steps.",
                example=3,
            )
        ),
    )
    until: int | Until | None = field(
        default=None,
        metadata=declared(
            Option(
                kind=kinds.num_steps_or(get_args(Until)),
                group=OptionGroup.RECORDING,
                help="Instead of --steps: run to this step, to the first validation or checkpoint after training "
                "began, or to the script's end.",
                example="end",
            )
        ),
    )
    updates_per_step: int = field(
        default=1,
        metadata=declared(
            Option(
                kind=kinds.whole_number(least=1),
                group=OptionGroup.RECORDING,
                help="Optimizer steps that make one step: the updates on one rollout of PPO or GRPO, with the rollout.",
                example=8,
            )
        ),
    )
    timeout_s: float | None = field(
        default=None,
        metadata=declared(
            Option(
                name="timeout",
                kind=kinds.seconds(),
                group=OptionGroup.RECORDING,
                help="End the script after this many seconds.",
                example=600,
            )
        ),
    )
    kernels: bool = field(
        default=True,
        metadata=declared(
            Option(
                kind=kinds.switch(),
                group=OptionGroup.RECORDING,
                help="Time the kernels of one step: measured on a real GPU, estimated on the virtual one.",
                off_flag="--no-kernels",
                example=False,
            )
        ),
    )
    clock_run: bool = field(
        default=False,
        metadata=declared(
            Option(
                kind=kinds.switch(),
                group=OptionGroup.RECORDING,
                help="Run a script that ends with its recorded steps a second time, without recording, to measure the "
                "host's time in the steps after the first.",
                example=True,
            )
        ),
    )
    times: str | None = field(default=None, metadata=declared(TIMES))
    page: bool = field(
        default=True,
        metadata=declared(
            Option(
                kind=kinds.switch(),
                group=OptionGroup.RECORDING,
                help="Write report.html when the rank has ended. `fakedist view` makes it later.",
                off_flag="--no-page",
                example=False,
            )
        ),
    )
    nsys: bool = field(
        default=False,
        metadata=declared(
            Option(
                kind=kinds.switch(),
                group=OptionGroup.RECORDING,
                help="Run the rank under Nsight Systems, which then times that step. The run keeps its report.",
                example=True,
            )
        ),
    )
    nsys_args: tuple[str, ...] = field(
        default=(),
        metadata=declared(
            Option(
                kind=kinds.shell_words(),
                group=OptionGroup.RECORDING,
                help="Extra arguments for `nsys profile`, as one string.",
                example="--trace=cuda,nvtx '--stats=a b'",
            )
        ),
    )

    def __post_init__(self) -> None:
        for option in JOB_OPTIONS:
            value = getattr(self, option.field)
            if value is not option.default:
                _check(option, value)
        if not 0 <= self.rank < self.world_size:
            raise JobError(
                f"rank {self.rank} does not exist in a world of {self.world_size}",
                f"ranks go from 0 to {self.world_size - 1}",
            )
        if isinstance(self.steps, int) and isinstance(self.until, int) and self.steps != self.until:
            raise JobError(
                f"{self.steps} steps and until step {self.until} contradict each other", "give steps or until"
            )
        if self.times and self.device == "cuda":
            raise JobError(
                "on a real GPU kernels are measured; a calibration table is for estimates", "leave out times"
            )
        if self.reserve_bytes is not None:
            self._check_reserve(self.reserve_bytes)
        if self.gpu_lag != "none" and self.device == "cuda":
            raise JobError("a real GPU lags as it does; gpu_lag is for the virtual one", "leave out gpu_lag")
        if self.clock_run and (self.device == "cuda" or self.nsys or not self.kernels):
            raise JobError("a second run measures the host of an estimated step", "leave out clock_run")
        if self.nsys_args and not self.nsys:
            raise JobError("arguments for nsys are given, but the rank does not run under nsys", "add nsys")

    def _check_reserve(self, reserve_bytes: int) -> None:
        if self.device == "cuda":
            raise JobError(
                "on a real GPU others hold what they do; reserve is for the virtual one", "leave out reserve"
            )
        if self.gpu_memory_bytes == UNLIMITED_BYTES:
            raise JobError("unlimited memory less what others hold is unlimited", "leave out reserve or gpu_memory")
        whole_bytes = self.gpu_memory_bytes or (GPUS[self.gpu].memory_bytes if self.gpu in GPUS else None)
        if whole_bytes is not None and whole_bytes - reserve_bytes < MIN_GPU_MEMORY_BYTES:
            least = format_bytes(MIN_GPU_MEMORY_BYTES)
            raise JobError(f"reserve leaves PyTorch less than {least} of the GPU's memory", "give a smaller reserve")

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

    def to_dict(self) -> dict[str, object]:
        """The job as plain values, for run.json and for the process that runs it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Job:
        """Rebuild the job from :meth:`to_dict`'s values, as they come back from JSON. Unknown keys are ignored.

        Raises:
            JobError: A value is invalid.
        """
        # The kinds check every type, which mypy cannot follow.
        stored: dict[str, Any] = {
            field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values
        }
        stored["arguments"] = tuple(map(str, stored.get("arguments", ())))
        for option in JOB_OPTIONS:
            if option.field in stored and option.field != "rank" and stored[option.field] != option.default:
                stored[option.field] = option.read(stored[option.field], Door.COMMAND_LINE)
        return cls(**stored)


def _check(option: Option, value: object) -> None:
    try:
        option.kind.read(value)
    except RefusedError as error:
        raise option.refusal(error, Door.COMMAND_LINE) from None


#: The options that set a field of the job.
JOB_OPTIONS = options_of(Job)
_FIRST = ("world_size", NNODES.name, "gpus_per_node", "rank")
#: Every option, in the order of ``--help``.
OPTIONS = sorted([*JOB_OPTIONS, NNODES], key=lambda option: (*_FIRST, option.name).index(option.name))


#: Options that a sweep does not have, because its points run on the virtual GPU.
NOT_SWEPT = ("device", "nsys", "nsys_args")

#: Always given. Their defaults on the command line depend on the machine, or on what the user expects.
_ALWAYS = ("world_size", "rank", "device", "steps")


def profile_arguments(job: Job, ranks: Sequence[int] = ()) -> list[str]:
    """Arguments of ``fakedist profile`` that run the job, or these ranks of it: options that differ from defaults."""
    arguments = []
    for option in JOB_OPTIONS:
        value = getattr(job, option.field)
        if option.field == "rank":
            arguments.append(f"--rank={','.join(map(str, ranks)) or job.rank}")
        elif value != option.default or option.field in _ALWAYS:
            arguments += option.arguments(value)
    return [*arguments, *(["-m"] if job.is_module else []), job.target, *job.arguments]


def profile_command(job: Job, ranks: Sequence[int] = ()) -> str:
    """The complete shell command that runs the job, or these ranks of it."""
    return shlex.join(["fakedist", "profile", *profile_arguments(job, ranks)])


def options_among(arguments: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[list[str]], list[str]]:
    """A command's options among arguments, each with its value, and the other arguments.

    ``takes_value`` has the command's flags, and whether a value follows.
    """
    own: list[list[str]] = []
    others: list[str] = []
    position = 0
    while position < len(arguments):
        name, _, joined = arguments[position].partition("=")
        takes = takes_value.get(name.replace("_", "-"))
        width = 2 if takes and not joined else 1
        words = list(arguments[position : position + width])
        if takes is None:
            others += words
        else:
            own.append(words)
        position += width
    return own, others
