"""Changes that would shorten a step: each one of its network, host or GPU that applies, and the best two together."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np
import pandas as pd

from fakedist.cost_model.collectives.communication import Communication
from fakedist.cost_model.collectives.fabric import Fabric
from fakedist.cost_model.estimated import (
    JobNetwork,
    Models,
    NetworkChoice,
    communication_for,
    network_of,
    prices_of,
)
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.cost_model.step import PriceList, StepLaunches
from fakedist.cost_model.what_if import (
    changed_fabric,
    changed_launches,
    chosen_layers,
    loop_of_optimizer,
    read_what_if,
)
from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.rundir.step_time import HostWait, LayerTime, StepBreakdown, TimeGain
from fakedist.units import format_us

#: GPUs in one NVLink domain of a rack.
_RACK = 72
_MOST_GROUPS = 3
_MOST_GPUS = 3
#: Rows of ``launches`` that all changes together may place: the largest steps try only the first few changes.
_MOST_ROWS = 2_000_000
_PEAK = "bf16"
#: A step, or a clock, above this share of the other is not faster.
_FASTER = 0.99
#: Advice for the host that leaves more than this share of the step is none.
_WORTH = 0.999
_MOST_LINES = 3
#: Of so many of the best changes, every two are priced together.
_PAIRED = 3
#: Published gains of ``separate=``: calls at once share the links, which is estimated.
_SEPARATE = (
    "a communicator per kind of collective: measured throughput was 8.5% and 20% higher with one for FSDP's "
    "reduce-scatters (facebookresearch/fairscale#897), and about 15% together with SHARP (NVIDIA/Megatron-LM#2663)"
)


_Lever = Literal["gpu", "nics", "nvlink", "domains", "host", "streams", ""]


@dataclass(frozen=True)
class _Change:
    """A change in words, and as an option of ``fakedist time``; what it follows from, or its source.

    Two changes of one ``lever`` make no pair, and those without one, which are bounds, make none at all.
    """

    title: str
    option: str
    value: str
    lever: _Lever
    evidence: str = ""


def find_gains(
    tables: Mapping[str, pd.DataFrame], models: Models, job: Job | None, time: StepBreakdown, prices: PriceList
) -> list[TimeGain]:
    """The step with each change that applies and with the best two, the shortest first.

    Only another GPU or fabric has prices of its own. Every other change places the launches again.

    Args:
        tables: ``launches`` (not empty), ``work``, ``calls``, ``groups`` and ``layers``; with lines also
            ``operation_stacks`` and ``stacks``.
        models: What the step was priced with.
        time: The step as it is.
        prices: Its prices.

    Raises:
        RunDirectoryError: The tables are damaged.
    """
    changed = _ChangedStep(tables, models, job, prices)
    most = max(_MOST_ROWS // len(tables["launches"]), 1)
    singles: dict[_Change, TimeGain] = {}
    for change in [*_changes(time, models, tables)][:most]:
        with suppress(JobError):  # the step lacks what the change is about
            gain = changed.priced([change])
            why = "" if gain.step_us < _FASTER * time.step_us else gain.why
            if not change.evidence or gain.step_us < _WORTH * time.step_us:
                singles[change] = replace(gain, why=change.evidence or why)
    apart = [change for change in singles if change.lever == "streams"]
    for bound in [change for change in singles if change.value == "overlap"] if apart else []:
        # Whatever is changed about overlap, this is the most of it.
        best = min([changed.priced([bound, *apart]), *(singles[each] for each in (bound, *apart))], key=_by_step)
        singles[bound] = replace(best, title=bound.title, why="")
    pairs = [changed.priced(pair) for pair in _pairs(singles, time)[: max(most - len(singles), 0)]]
    best_pair = min(pairs, key=_by_step, default=None)
    least_us = _FASTER * min((gain.step_us for change, gain in singles.items() if change.lever), default=0.0)
    gains = [*singles.values()]
    if best_pair is not None and best_pair.step_us < least_us:
        gains.append(replace(best_pair, why="", is_pair=True))
    return sorted(gains, key=_by_step)


def _by_step(gain: TimeGain) -> float:
    return gain.step_us


def _pairs(singles: Mapping[_Change, TimeGain], time: StepBreakdown) -> list[tuple[_Change, _Change]]:
    """Every two of the three changes of different levers that shorten the step most."""
    best: dict[str, _Change] = {}
    for change, gain in sorted(singles.items(), key=lambda item: item[1].step_us):
        if change.lever and gain.step_us < _FASTER * time.step_us:
            best.setdefault(change.lever, change)
    return [*combinations([*best.values()][:_PAIRED], 2)]


class _ChangedStep:
    """A step that is priced with changes; ``tables`` and ``prices`` are those of :func:`find_gains`."""

    def __init__(self, tables: Mapping[str, pd.DataFrame], models: Models, job: Job | None, prices: PriceList) -> None:
        self._tables, self._models, self._job, self._prices = tables, models, job, prices
        of_work = tables["launches"]["work"].to_numpy("i8")
        self._counts = np.bincount(of_work[of_work >= 0], minlength=len(tables["work"]))
        # Pairs have what their parts were priced with.
        self._on_gpu = functools.cache(self._priced_on)
        self._calls: dict[tuple[str, Fabric], Communication] = {}

    def _priced_on(self, gpu: str) -> tuple[Models, pd.DataFrame]:
        models = _on(GPUS[gpu], self._models, self._job)
        return models, models.prices.price(self._tables["work"], self._counts)

    def _communication(self, gpu: GpuSpec, network: JobNetwork) -> Communication:
        key = gpu.name, network.fabric
        if key not in self._calls:
            self._calls[key] = communication_for(self._tables, gpu, network)
        return self._calls[key]

    def priced(self, changes: Sequence[_Change]) -> TimeGain:
        """The step with all of some changes; JobError if it lacks what one is about."""
        models = self._models
        prices = self._prices.work
        why = ""
        for change in (each for each in changes if each.option == "--gpu"):
            models, prices = self._on_gpu(change.value)
            why = _why_not_faster(models)
        what_ifs = [change for change in changes if change.option == "--what-if"]
        network = _with(models, [change.value for change in what_ifs])
        is_alike = models is self._models and network.fabric == models.network.fabric
        calls = self._prices.calls if is_alike else None
        calls = calls or self._communication(models.gpu, network)
        rows = self._tables["launches"]
        for what_if in network.what_ifs:
            rows, calls = changed_launches(what_if, rows, calls, self._tables)
        step = StepLaunches(rows, self._tables["work"], prices, calls).place(models.host.costs)
        titles = [
            f"{change.title}, fabric {models.network.fabric.name}" if change.option == "--gpu" else change.title
            for change in changes
        ]
        options = [f"--gpu {change.value}" for change in changes if change.option == "--gpu"]
        options += [f"--what-if {'+'.join(change.value for change in what_ifs)}"] if what_ifs else []
        return TimeGain(" and ".join(titles), " ".join(options), step.placed.end_us, why)


def _changes(time: StepBreakdown, models: Models, tables: Mapping[str, pd.DataFrame]) -> Iterator[_Change]:
    """The changes that may matter: of links that calls use, of a host that is waited for, of the GPU."""
    between, within = (
        [row for row in time.by_group if row.group_size > 1 and (row.num_nodes > 1) is over] for over in (True, False)
    )
    if between:
        yield _Change("twice the NIC bandwidth", "--what-if", "bandwidth=2x", "nics")
    if within and (models.network.fabric.nvlink_bandwidth or models.gpu.nvlink_bandwidth):
        yield _Change("twice the NVLink bandwidth", "--what-if", "bandwidth=nvlink:2x", "nvlink")
    if between and models.gpu.nvlink_bandwidth and models.network.fabric.gpus_per_node < _RACK:
        yield _Change(f"NVLink domains of {_RACK} GPUs", "--what-if", f"gpus-per-node={_RACK}", "domains")
    if time.launch_gap_us or any(part.kind == "host" for part in time.critical_path):
        yield _Change("a host that launches in no time", "--what-if", "no-host-waits", "")
        yield _Change("a host twice as fast", "--what-if", "host=2x", "host")
        yield _Change("a host that never waits for the GPU", "--what-if", "no-sync", "")
        yield from _host_changes(time, tables)
    for spec in faster_gpus(models.gpu):
        yield _Change(spec.name, "--gpu", spec.name, "gpu")
    kinds: dict[str, set[str]] = {}
    for row in time.by_group:
        kinds.setdefault(row.group, set()).add(row.operation)
    for group in [name for name, operations in kinds.items() if len(operations) > 1 and name][:_MOST_GROUPS]:
        title = f"a communicator per kind of collective: {group}"
        yield _Change(title, "--what-if", f"separate={group}", "streams", _SEPARATE)
    if any(row.exposed_us for row in time.by_group):
        yield _Change("at most, with perfect overlap: nothing waits for a collective", "--what-if", "overlap", "")
    if time.by_group:
        yield _Change("no overlap: everything one after another", "--what-if", "no-overlap", "")


def _host_changes(time: StepBreakdown, tables: Mapping[str, pd.DataFrame]) -> Iterator[_Change]:
    """Advice on a late host, each piece with what it follows from."""
    for wait in [wait for wait in time.host_waits if wait.idle_us and wait.line][:_MOST_LINES]:
        line = wait.line.partition(" (")[0].rpartition("/")[2]
        title = {
            "read": f"no value of the GPU is read at {line}",
            "copy": f"the copy at {line} is pinned and non-blocking",
            "synchronize": f"the host does not synchronize {'after' if wait.is_after else 'at'} {line}",
        }[wait.kind]
        yield _Change(title, "--what-if", f"no-sync={line}", "host", _waits_there(wait, line))
    launches, work = tables["launches"], tables["work"]
    loop, per_parameter = loop_of_optimizer(launches, work)
    if loop.any():
        why = f"the optimizer launches {int(loop.sum()):,} kernels, {per_parameter:.0f} for each parameter"
        yield _Change("an optimizer with foreach=True or fused=True", "--what-if", "foreach", "host", why)
    bound = max(launch_bound(time.layers), key=lambda row: row.launch_gap_us, default=None)
    if bound is None:
        return
    why = f"{bound.name}: the host takes {format_us(bound.host_us)} to launch {format_us(bound.total_us)} of kernels"
    yield _Change(f"CUDA graphs for {bound.name}", "--what-if", f"cuda-graphs={bound.name}", "host", why)
    if not _is_compiled(tables, bound):
        title = f"torch.compile for {bound.name}: launches without torch's operations, no kernel fused"
        yield _Change(title, "--what-if", f"compile={bound.name}", "host", why)


def _waits_there(wait: HostWait, line: str) -> str:
    times = "once" if wait.num_waits == 1 else f"{wait.num_waits:,} times"
    return f"{line}: the host waits {times}, and the GPU is idle for {format_us(wait.idle_us)} because of it"


def launch_bound(layers: Sequence[LayerTime]) -> list[LayerTime]:
    """The layers whose kernels take less time than the host takes to launch them, in their order.

    A layer that is in another such layer counts with that one; a whole model does not count, only what is in it.
    """
    bound: list[LayerTime] = []
    inside = -1  # depth of the last one: deeper rows after it are in it
    for row in layers:
        if inside >= 0 and row.depth > inside:
            continue
        inside = -1
        if row.depth and row.name and row.host_us > row.total_us and row.launch_gap_us:
            bound.append(row)
            inside = row.depth
    return bound


def _is_compiled(tables: Mapping[str, pd.DataFrame], bound: LayerTime) -> bool:
    """Whether any of a layer's kernels is one that Inductor made."""
    own = chosen_layers(bound.name, tables["layers"])
    rows = tables["launches"][own[tables["launches"]["layer"].to_numpy("i8")]]
    names = tables["work"]["name"].astype(str).iloc[rows["work"][rows["work"] >= 0].to_numpy("i8")]
    return bool(names.str.startswith("triton_").any())


def faster_gpus(gpu: GpuSpec) -> list[GpuSpec]:
    """The next models for a data centre, by their bf16 peak and memory bandwidth; of a GPU file, the one it is like."""
    own = GPUS.get(gpu.like or gpu.name, gpu)
    if not own.nvlink_bandwidth:
        return []
    faster = [
        spec
        for spec in GPUS.values()
        if spec.nvlink_bandwidth
        and spec.name != own.name
        and spec.compute_capability >= own.compute_capability
        and spec.peak_flops[_PEAK] >= own.peak_flops[_PEAK]
        and spec.memory_bandwidth >= own.memory_bandwidth
    ]
    return faster[:_MOST_GPUS]


def _on(gpu: GpuSpec, models: Models, job: Job | None) -> Models:
    chosen = NetworkChoice(interferes=models.network.interferes, experts=models.network.experts)
    network = network_of(gpu, job, chosen, models.network.nccl)
    return Models(gpu, prices_of(gpu), network, models.host.next_to(gpu))


def _why_not_faster(models: Models) -> str:
    clock = models.prices.clock if isinstance(models.prices, KernelTimes) else None
    if clock is None or clock.fraction > _FASTER:
        return ""
    return f"{models.gpu.name} is held by its power limit of {clock.watts:,.0f} W at {clock.fraction:.0%} of the clock"


def _with(models: Models, changes: Sequence[str]) -> JobNetwork:
    """The network with changes, of which the step's launches may have a part."""
    what_ifs = tuple(map(read_what_if, changes))
    fabric = models.network.fabric
    for what_if in what_ifs:
        fabric = changed_fabric(what_if, fabric, models.gpu.nvlink_bandwidth)
        if what_if.gpus_per_node is not None:
            per_gpu = fabric.nics_per_node / fabric.gpus_per_node
            nics = max(math.floor(what_if.gpus_per_node * per_gpu + 0.5), 1)
            fabric = replace(fabric, gpus_per_node=what_if.gpus_per_node, nics_per_node=nics)
    return replace(models.network, fabric=fabric, what_ifs=what_ifs)
