"""The host of a GPU: how long torch, Python and CUDA's own calls take there.

Where a run has a host clock, each launch has the time that the script, torch and Python took before it on the machine
that recorded it. A host model scales that, by a forward of torch's ``Linear``: the time on the host, less what CUDA's
own calls take of it, over the time on the recording machine, where those calls take nothing. What the calls take is
added for each launch. Without a clock, the host takes a constant time for each operation and launch.

A forward of ``Linear`` is the one operation whose time is published for named hosts. The models' own, and how much
longer CUDA's calls take in a step, are fitted on published steps (docs/accuracy/method.md). About half of the forward
is Python. It was published without saying whether torch recorded a graph for it: here it does, as in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from fakedist.bounded import UnreadableError, read_toml
from fakedist.errors import JobError
from fakedist.gpu.models.spec import QUEUE_DEPTH, GpuSpec
from fakedist.rundir.step_time import ClockSteadiness, HostTime

#: The constant host time, least and most, over the estimate (90 % interval). A host may be twice as fast. A forward of
#: torch's Linear takes 13.5 us on a DGX H100, where 11 are counted, and 33 to 37 on Grace; Transformer Engine's takes
#: 91 to 100 there (NVIDIA/TransformerEngine#2053). Tests of Megatron-LM that the host limits take 4.6 to 6 times what
#: is counted (docs/accuracy/results.md).
CONSTANT_RANGE = (0.5, 6.5)


@dataclass(frozen=True)
class CallCosts:
    """Microseconds of the host in CUDA's own calls, which take nothing on the virtual GPU.

    Attributes:
        launch_us: A kernel's launch.
        graph_us: The launch of a CUDA graph.
        event_us: Recording an event, having a stream wait for it, and a wait of the host besides the waiting itself.
        copy_us: A copy or a fill.
        product_us: What cuBLAS takes for a product besides its launch.
        collective_us: A collective through torch and NCCL, its launch included.
    """

    launch_us: float = 0.0
    graph_us: float = 0.0
    event_us: float = 0.0
    copy_us: float = 0.0
    product_us: float = 0.0
    collective_us: float = 0.0


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of the host, each with its source.

    Attributes:
        operation_us: An operation of torch that was not measured, without its launches: 4 us (pytorch/pytorch#82793;
            2 to 7 us in #41383).
        launch_us: A launch, without a host clock: 3 us (meta-pytorch/tritonbench#1017 gives 1.3 on x86 and 3.0 on GB200
            for cuLaunchKernel).
        graph_us: A launch of a CUDA graph, without a host clock: 2.5 us (NVIDIA, "Constant Time Launch for
            Straight-Line CUDA Graphs"), and as much again for torch's replay, an assumption.
        dispatch: What the host clock measured takes this many times as long on the host.
        calls: CUDA's own calls, in a step with a host clock.
        range: The host's time, least and most, over the estimate (90 % interval).
        queue_depth: Launches by which it can be ahead of a stream.
    """

    operation_us: float = 4.0
    launch_us: float = 3.0
    graph_us: float = 5.0
    dispatch: float = 1.0
    calls: CallCosts = field(default_factory=CallCosts)
    range: tuple[float, float] = CONSTANT_RANGE
    queue_depth: int = QUEUE_DEPTH


def scaled(host: HostCosts, factor: float) -> HostCosts:
    """A host that takes ``factor`` times as long for everything."""
    return replace(
        host,
        operation_us=host.operation_us * factor,
        launch_us=host.launch_us * factor,
        graph_us=host.graph_us * factor,
        dispatch=host.dispatch * factor,
        calls=scaled_calls(host.calls, factor),
    )


def scaled_calls(calls: CallCosts, factor: float) -> CallCosts:
    """CUDA's calls that take ``factor`` times as long."""
    return CallCosts(**{name: us * factor for name, us in asdict(calls).items()})


@dataclass(frozen=True)
class HostSpec:
    """A host model.

    Attributes:
        name: The name that ``--host`` takes, or a file's.
        linear_us: A forward of torch's ``Linear`` on it, with CUDA's own calls.
        calls: CUDA's own calls, in microseconds.
        least: The host's time over the estimate where the host clock measured it: lower end of the 90 % interval.
        most: The upper end.
        of_machine: The host is the machine that recorded the run, this many times as slow; 0 for any other.
        calls_scale: CUDA's calls but collectives take this many times as long in a step, each between others.
    """

    name: str
    cpu: str
    linear_us: float
    calls: CallCosts
    least: float
    most: float
    of_machine: float = 0.0
    calls_scale: float = 1.0

    @property
    def dispatch_us(self) -> float:
        """A forward of ``Linear`` without CUDA's own calls: Python, torch's dispatch and its autograd."""
        return self.linear_us - self.calls.launch_us - self.calls.product_us

    @property
    def calls_in_step(self) -> CallCosts:
        """CUDA's calls in a step. A collective's time is that of torch's whole call, measured in a loop of them."""
        return replace(scaled_calls(self.calls, self.calls_scale), collective_us=self.calls.collective_us)


#: A host file's numbers, with the least and greatest sane value.
_NUMBERS = {
    "linear_us": (0.1, 10_000.0),
    **dict.fromkeys((attribute.name for attribute in fields(CallCosts)), (0.0, 10_000.0)),
    "calls_scale": (0.01, 100.0),
    "least": (0.01, 1.0),
    "most": (1.0, 100.0),
}
_KEYS = ("like", "cpu", *_NUMBERS)
#: How the name of a host file ends.
_ENDING = ".toml"
_THIS = "this"
_MOST_FACTOR = 1000.0


def read_host(path: Path, known: Mapping[str, HostSpec] | None = None) -> HostSpec:
    """The host model of a file, which may be like one of ``known``. JobError if it is missing or not valid."""
    try:
        values, _ = read_toml(path)
    except OSError as error:
        raise JobError(f"the host file {path} cannot be read: {error.strerror}", "name a file, or a host") from error
    except UnreadableError as error:
        raise JobError(f"the host file {path} is not TOML: {error}", "write lines such as linear_us = 13.5") from error
    for key in values:
        if key not in _KEYS:
            raise JobError(f"{path}: unknown key {key!r}", f"keys are {', '.join(_KEYS)}")
    known = known or {}
    like = values.get("like")
    if like is not None and (not isinstance(like, str) or like not in known):
        raise JobError(f"{path}: like = {like!r} names no known host", f"the known hosts are {', '.join(known)}")
    plain: dict[str, object] = {"calls_scale": 1.0} if like is None else _plain(known[like])
    cpu = values.get("cpu", plain.get("cpu", ""))
    if not isinstance(cpu, str) or not cpu.isprintable():
        raise JobError(f"{path}: cpu = {cpu!r} is not a text", 'write cpu = "..."')
    numbers = {name: _number(path, name, values.get(name, plain.get(name))) for name in _NUMBERS}
    calls = CallCosts(**{attribute.name: numbers.pop(attribute.name) for attribute in fields(CallCosts)})
    spec = HostSpec(path.name.removesuffix(_ENDING), cpu, calls=calls, **numbers)
    if spec.dispatch_us <= 0:
        raise JobError(
            f"{path}: linear_us = {spec.linear_us:g} is not more than launch_us and product_us, which are part of it",
            "linear_us is a whole forward of torch's Linear",
        )
    return spec


def _plain(spec: HostSpec) -> dict[str, object]:
    values = asdict(spec)
    return {**values, **asdict(spec.calls)}


def _number(path: Path, name: str, value: object) -> float:
    least, most = _NUMBERS[name]
    if value is None:
        raise JobError(f"{path}: {name} is missing", f'add it, or like = "{REFERENCE}" to take it from a known host')
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise JobError(f"{path}: {name} = {value!r} is not a number from {least:g} to {most:,g}", f"{name} = ...")
    return float(value)


_MODELS = Path(__file__).parents[1] / "gpu" / "models"
#: The relative standard deviation of 29 bare steps of a small GPT of Megatron-core, in five runs on a virtual machine
#: with other work. It counts for one or two steps, whose own says little.
_SPREAD = 0.14
_FEW = 2
#: Standard deviations of a normal error in half of a 90 % interval.
_DEVIATIONS = 1.645
#: The host that the constant times are taken for, and that call times are published for.
REFERENCE = "dgx-h100"
_NAMES = (REFERENCE, "grace")
HOSTS = {name: replace(read_host(_MODELS / f"{name}.host{_ENDING}"), name=name) for name in _NAMES}


def default_host(gpu: str) -> HostSpec:
    """The usual host of a GPU model, by the model's name, such as "h100-80g".

    Grace is that of the GB models. All others are taken to have a DGX H100's: no host time is published for the
    processors that are usual next to them.
    """
    return HOSTS["grace" if gpu.startswith("gb") else REFERENCE]


def check_host(text: str) -> None:
    """Raise JobError if this names no host: a known one, ``this``, a factor of this machine's time, or a file."""
    find_host(text, None)


def find_host(text: str, machine_us: float | None) -> HostSpec:
    """The host of a name in :data:`HOSTS`, ``this``, a factor such as "1.5", or a ``.toml`` file.

    Args:
        machine_us: A forward of ``Linear`` on the machine that recorded the run (``MachineScoreRecord``). Without it,
            ``this`` calls CUDA like a DGX H100.

    Raises:
        JobError: There is no such host, or the file is not valid.
    """
    if text in HOSTS:
        return HOSTS[text]
    if text.endswith(_ENDING):
        return read_host(Path(text), HOSTS)
    factor = 1.0 if text == _THIS else _factor(text)
    if factor is None:
        hint = f"known hosts are {', '.join(HOSTS)}; or this, a factor such as 1.5, a host file (my_host{_ENDING})"
        raise JobError(f"there is no host {text!r}", hint)
    reference = HOSTS[REFERENCE]
    slowness = factor if machine_us is None else factor * machine_us / reference.dispatch_us
    return replace(
        reference,
        name=_THIS if text == _THIS else f"{factor:g} times this machine's",
        cpu="the machine that recorded the run",
        linear_us=reference.linear_us * slowness,
        calls=scaled_calls(reference.calls, slowness),
        of_machine=factor,
    )


def _factor(text: str) -> float | None:
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        return None
    return factor if 0 < factor <= _MOST_FACTOR else None


@dataclass(frozen=True)
class HostModel:
    """A host to price a step for.

    Attributes:
        costs: What it takes.
        time: Where that comes from.
        chosen: The user's choice; None for the usual one.
    """

    costs: HostCosts = field(default_factory=HostCosts)
    time: HostTime = field(default_factory=lambda: HostTime("constant", REFERENCE, 1.0, *CONSTANT_RANGE))
    chosen: str | None = None

    def next_to(self, gpu: GpuSpec) -> HostModel:
        """The host next to another GPU: the same choice for the same run, or that GPU's usual host."""
        return host_model(gpu, self.chosen, self.time.machine_us, self.time.clock, depth=self.time.queue_depth)


def host_model(
    gpu: GpuSpec,
    chosen: str | None = None,
    machine_us: float | None = None,
    clock: ClockSteadiness | None = None,
    *,
    depth: int = QUEUE_DEPTH,
) -> HostModel:
    """The host of a step: the user's choice, else the GPU model's usual one.

    Args:
        chosen: As :func:`find_host` reads it.
        machine_us: As for :func:`find_host`.
        clock: How steady the host clock was; None for a step without one, whose host takes a constant time.
        depth: Launches by which the host can be ahead of a stream.

    Raises:
        JobError: There is no such host.
    """
    spec = default_host(gpu.like or gpu.name) if chosen is None else find_host(chosen, machine_us)
    slowness = spec.dispatch_us / HOSTS[REFERENCE].dispatch_us
    if clock is None:
        name, slowness = (REFERENCE, 1.0) if chosen is None else (spec.name, slowness)
        costs = scaled(HostCosts(queue_depth=depth), slowness)
        time = HostTime("constant", name, slowness, *costs.range, machine_us=machine_us, queue_depth=depth)
        return HostModel(costs, time, chosen)
    dispatch = spec.of_machine or (1.0 if machine_us is None else spec.dispatch_us / machine_us)
    own = HostCosts(queue_depth=depth)
    costs = replace(scaled(own, slowness), dispatch=dispatch, calls=spec.calls_in_step, range=widened(spec, clock))
    time = HostTime("measured", spec.name, dispatch, *costs.range, machine_us, spec.dispatch_us, clock, depth)
    return HostModel(costs, time, chosen)


def widened(spec: HostSpec, clock: ClockSteadiness) -> tuple[float, float]:
    """A host model's interval, wider by the error of the clock's mean and by the bound of fakedist's own time.

    All three are independent factors, so their logarithms add up in squares. The steps' standard deviation over the
    square root of their number is that of their mean.
    """
    spread = clock.spread if clock.num_repeats > _FEW else max(clock.spread, _SPREAD)
    own = (_DEVIATIONS * math.log1p(spread) / math.sqrt(clock.num_repeats), math.log1p(clock.bound))
    return math.exp(-math.hypot(math.log(spec.least), *own)), math.exp(math.hypot(math.log(spec.most), *own))
