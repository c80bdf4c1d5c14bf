"""Times of collectives: measured in one NVLink domain, a model fitted to published logs between nodes.

- *One domain* (a node, or an NVL72): nccl-tests on this GPU model, interpolated between message sizes and numbers of
  GPUs (both logarithmic). Beyond the largest message its bus bandwidth holds.
- *Between nodes*: a ring takes a latency per step, and the bytes over the lower bandwidth of the group's NICs and
  NVLink. An all_reduce may run on a tree, in fewer steps. An all_to_all sends its remote part over one NIC per rank.
  Small messages run on protocols with a shorter latency. A send takes one NIC, or NVLink inside a node.
- Over nodes, nothing is faster than between as many GPUs of one node: GPUs without NVLink share links with their NICs.
- What was not measured (more GPUs, another model, NCCL's variables) scales what was by the ratio of NCCL's tuner
  (:mod:`fakedist.cost_model.nccl.settings`), which also chooses algorithm and protocol.

docs/accuracy/results.md has the logs, and the errors when part of them is left out.

The interconnect of a cluster: NVLink inside a node, NICs between nodes. Bandwidths are bytes per second, one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fakedist import extras
from fakedist.bounded import UnreadableError, read_toml
from fakedist.cost_model.kernels.measurements import Floats
from fakedist.cost_model.nccl.settings import (
    KIB,
    MIB,
    Candidate,
    GroupShape,
    Interconnect,
    Network,
    Settings,
    Tuner,
    interconnect_like,
)
from fakedist.errors import JobError, SetupError
from fakedist.gpu.models.catalogue import GPUS
from fakedist.gpu.models.spec import GpuSpec
from fakedist.rundir.plain import from_plain

_GB = 1e9
_SPECIFICATION_SPREAD = 0.5


@dataclass(frozen=True)
class Fabric:
    """The connections between the GPUs of a cluster.

    Attributes:
        spread: The 90 % interval of a collective over several nodes, as the size of the logarithm of truth over
            estimate: wide where only the specification is known.
        gpus_per_node: GPUs in one NVLink domain.
        nics_per_node: NICs of those GPUs together.
        achieved: The fraction of the NICs' bandwidth that a long ring reaches.
        hop_us: Latency of a ring's step from node to node.
        local_hop_us: The same within a node, in a ring over several nodes.
        tree_hop_us: Latency of a tree's step from node to node.
        send_bandwidth: Of one send between two nodes, with NCCL's default chunks.
        send_us: Latency of a send between two nodes.
        nvlink_bandwidth: Of one GPU; 0 takes the GPU model's.
        spans_hosts: An NVLink domain is larger than a host, so a job's GPUs per host do not show it.
        segment: GPUs of a domain that a job of several domains has; 0: all of them.
    """

    name: str
    source: str
    spread: float
    gpus_per_node: int
    nics_per_node: int
    nic_bandwidth: float
    achieved: float
    hop_us: float
    local_hop_us: float
    tree_hop_us: float
    send_bandwidth: float
    send_us: float
    nvlink_bandwidth: float = 0.0
    spans_hosts: bool = False
    segment: int = 0


#: hop_us, local_hop_us and achieved are fitted to the logs of 1, 2, 4 and 8 GPUs on each of ten nodes
#: (docs/accuracy/results.md shows them left out); send: the same logs, sendrecv of one GPU a node.
_NDR = Fabric(
    name="dgx-h100-ndr",
    source="nccl-tests on ten nodes of eight H100, InfiniBand NDR (xxrjun/nccl-tests-cluster @455de4f8)",
    spread=0.35,
    gpus_per_node=8,
    nics_per_node=8,
    nic_bandwidth=50 * _GB,
    achieved=0.978,
    hop_us=9.0,
    local_hop_us=6.0,
    tree_hop_us=20.9,
    send_bandwidth=24.9 * _GB,
    send_us=18.0,
)
FABRICS = {
    fabric.name: fabric
    for fabric in (
        _NDR,
        replace(
            _NDR,
            name="dgx-a100-hdr",
            source="specification only: NVIDIA DGX A100 (eight HDR NICs of 200 Gb/s); latencies of dgx-h100-ndr",
            spread=_SPECIFICATION_SPREAD,
            nic_bandwidth=25 * _GB,
            send_bandwidth=20 * _GB,
        ),
        replace(
            _NDR,
            name="dgx-b200-ndr",
            source="specification only: NVIDIA DGX B200 (eight NDR NICs of 400 Gb/s); latencies of dgx-h100-ndr",
            spread=_SPECIFICATION_SPREAD,
        ),
        replace(
            _NDR,
            name="gb200-nvl72",
            source="NVLink: nccl-tests on 4 to 64 GB200 of an NVL72 (aiconfigurator 0.6.0). Between racks: "
            "specification only (a NIC of 400 Gb/s a GPU), latencies of dgx-h100-ndr. Segments of 16 hosts of four: "
            "NVIDIA's job scripts (Slurm's --segment=16), the most that CoreWeave recommends",
            spread=_SPECIFICATION_SPREAD,
            gpus_per_node=72,
            nics_per_node=72,
            spans_hosts=True,
            segment=64,
        ),
        replace(
            _NDR,
            name="p5-efa",
            source="bus bandwidth of 256 MB on 2 to 64 AWS p5 nodes (3,200 Gb/s of EFA a node)",
            spread=0.4,
            hop_us=39.0,
            local_hop_us=39.0,
            tree_hop_us=450.0,
        ),
    )
}
#: The fabric that is taken for a GPU model if none is named.
_DEFAULTS = (
    ("a100", "dgx-a100-hdr"),
    ("gb", "gb200-nvl72"),
    ("b", "dgx-b200-ndr"),
)


def default_fabric(gpu: str) -> Fabric:
    """The fabric for a GPU model, by the model's name, such as "h100-80g"."""
    return FABRICS[next((name for prefix, name in _DEFAULTS if gpu.startswith(prefix)), "dgx-h100-ndr")]


def find_fabric(name: str, gpus_per_node: int | None = None, world_size: int = 0) -> Fabric:
    """A preset of FABRICS by name, or a TOML file by path (:func:`read_fabric`); JobError if it is neither.

    With ``gpus_per_node``, the size of an NVLink domain, the NICs change in proportion. Without it, a job of
    ``world_size`` ranks that does not fit one domain has a segment of each.
    """
    if name in FABRICS:
        fabric = FABRICS[name]
    elif name.endswith(".toml"):
        fabric = read_fabric(Path(name))
    else:
        raise JobError(f"there is no fabric {name!r}", f"presets are {', '.join(FABRICS)}; or name a file.toml")
    if gpus_per_node is None and world_size > fabric.gpus_per_node:
        gpus_per_node = fabric.segment or None
    if gpus_per_node is None or gpus_per_node == fabric.gpus_per_node:
        return fabric
    nics = max(round(fabric.nics_per_node * gpus_per_node / fabric.gpus_per_node), 1)
    return replace(fabric, gpus_per_node=gpus_per_node, nics_per_node=nics)


#: A fabric file's key -> the field, the factor that makes the field's unit, and the least and greatest sane value.
_KEYS = {
    "gpus_per_node": ("gpus_per_node", 1, 1, 1024),
    "nics_per_node": ("nics_per_node", 1, 1, 1024),
    "nic_gbit_per_s": ("nic_bandwidth", 1e9 / 8, 1, 10_000),
    "nvlink_gbyte_per_s": ("nvlink_bandwidth", _GB, 0, 100_000),
    "achieved": ("achieved", 1, 0.01, 1),
    "hop_us": ("hop_us", 1, 0, 10_000),
    "local_hop_us": ("local_hop_us", 1, 0, 10_000),
    "tree_hop_us": ("tree_hop_us", 1, 0, 10_000),
    "send_gbyte_per_s": ("send_bandwidth", _GB, 0.01, 10_000),
    "send_us": ("send_us", 1, 0, 10_000),
    "spread": ("spread", 1, 0.01, 2),
}


def read_fabric(path: Path) -> Fabric:
    """Read a TOML file with ``_KEYS`` and ``like``, a preset for the others; JobError if it is missing or invalid."""
    try:
        text, _ = read_toml(path)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}", "name an existing fabric file") from error
    except UnreadableError as error:
        raise JobError(f"{path} is not TOML: {error}", "keys are like, nic_gbit_per_s, ...") from error
    like = text.pop("like", "dgx-h100-ndr")
    if not isinstance(like, str) or like not in FABRICS:
        raise JobError(f"{path}: like = {like!r} names no preset", f"presets are {', '.join(FABRICS)}")
    fabric = replace(FABRICS[like], name=path.stem, source=f"{path.name}, like {like}", spread=_SPECIFICATION_SPREAD)
    return from_plain(Fabric, asdict(fabric) | _values(path, text))


def _values(path: Path, text: Mapping[str, object]) -> dict[str, float]:
    values: dict[str, float] = {}
    for key, value in text.items():
        if key not in _KEYS:
            raise JobError(f"{path}: unknown key {key!r}", f"keys are like, {', '.join(_KEYS)}")
        field, factor, least, most = _KEYS[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise JobError(f"{path}: {key} = {value!r} is not a number from {least:,} to {most:,}", f"{key} = ...")
        whole = next(attribute.type for attribute in fields(Fabric) if attribute.name == field) == "int"
        if whole and value != int(value):
            raise JobError(f"{path}: {key} = {value!r} is not a whole number", f"{key} = {round(value)}")
        values[field] = int(value) if whole else float(value) * factor
    return values


TABLE = Path(__file__).parents[1] / "data" / "collectives.csv"
COLUMNS = ("gpu", "operation", "nodes", "gpus_per_node", "bytes", "time_us", "origin")


@cache
def load_collectives(path: Path = TABLE) -> pd.DataFrame:
    """The logs, a row for each measured message.

    Columns: gpu (as ``--gpu`` names it), operation (all_reduce, all_gather, reduce_scatter, all_to_all, send), nodes
    (or NVLink domains), gpus_per_node (that take part), bytes (the whole buffer: nccl-tests' size), time_us (out of
    place), origin.

    Raises:
        SetupError: The table is missing or damaged.
    """
    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise SetupError(
            f"the measured times of collectives are missing: {path}", "make measured writes them"
        ) from None
    except (OSError, ValueError) as error:
        raise SetupError(f"the measured times of collectives are damaged: {path}: {error}", "make measured") from error
    if list(table.columns) != list(COLUMNS) or not (table["time_us"] > 0).all():
        raise SetupError(f"the measured times of collectives are damaged: {path}", "make measured writes them")
    return table


#: The sharpness of the change from NICs to NVLink as the limit of a ring: ten nodes of eight H100 reach 324 GB/s where
#: NICs allow 391 and NVLink 362.
_SHARPNESS = 5.0
#: LL128 and LL have less latency and less bandwidth, as NCCL's tuner has them (src/graph/tuning.cc @5067397c): the
#: latency of the call, of a step within and between nodes in microseconds, and the fraction of the bandwidth.
_QUICK = ((14.0, 1.9, 4.0, 0.92), (6.6, 0.6, 2.7, 0.07))
#: What the tuner's latencies have to be multiplied by to meet ten nodes of eight H100 at 32 MiB.
_TUNER_LATENCY = 3.0
#: An all_to_all between nodes: the call, and each peer (fitted to 10 x 1 to 10 x 8).
_ALL_TO_ALL_US, _PEER_US, _ALL_TO_ALL_ACHIEVED = 75.0, 3.4, 0.93
_LEAST_BYTES = 8.0
#: A send between nodes, by its chunk (NCCL_P2P_NET_CHUNKSIZE): 24.9 GB/s with NCCL's default, 46 to 48 with 2 MiB
#: (xxrjun/nccl-tests-cluster @455de4f8, sendrecv of one GPU a node). In between, interpolated by the logarithm.
_SEND_CHUNKS, _SEND_GAIN = (128 * KIB, 2 * MIB), (1.0, 47.0 / 24.9)


@dataclass(frozen=True)
class CollectiveTime:
    """The time of a collective.

    Attributes:
        algorithm: ring, tree, nvls, nvlstree, pat, pairs, send or copy; none in a group of one.
        protocol: ll, ll128 or simple.
        spread: The 90 % interval, as the size of the logarithm of truth over estimate.
        link_share: The fraction of the time for which its bytes would keep the links busy.
        basis: Measured in one domain, fitted between nodes, or one of these and the tuner.
    """

    time_us: float
    algorithm: str
    protocol: str
    spread: float
    link_share: float
    basis: str


#: 90 % intervals in one domain: as many GPUs as were measured, another number, and more than twice the most; another
#: GPU model with NVLink, and without, where hosts differ most (docs/accuracy/results.md).
_DOMAIN_SPREAD, _COUNT_SPREAD, _FAR_SPREAD, _OTHERS_SPREAD, _PCIE_SPREAD = 0.15, 0.3, 0.7, 0.6, 2.0
#: Over nodes, messages from this size on were measured. Smaller ones rest on the tuner's latencies.
_MEASURED_BYTES, _SMALL_SPREAD = 32e6, 0.7
#: A send inside a node: the call, and the fraction of NVLink's bandwidth (8 H100, nccl-tests sendrecv: 348 GB/s).
_SEND_US, _SEND_ACHIEVED = 5.0, 0.77


#: A copy between two GPUs of a node by a copy engine: its start, a guess from 2 to 3 us, and the fraction of NVLink's
#: bandwidth (8 H100, copies in both directions at once: 371 of 450 GB/s in each, NVIDIA/nccl#1264).
_COPY_US, _COPY_ACHIEVED = 2.5, 0.825
#: The shortest time of a kernel.
_KERNEL_US = 2.0


#: Collectives that move as much as others: a broadcast moves the buffer once, as an all_gather of it does.
_SAME = {"broadcast": "all_gather", "gather": "all_gather", "reduce": "reduce_scatter", "scatter": "reduce_scatter"}


class LibraryTime(NamedTuple):
    """The time of a kernel of a library other than NCCL, and the SMs it holds.

    ``spread``: its 90 % interval, as the logarithm of truth over estimate.
    """

    time_us: float
    spread: float
    sms: int
    text: str
    library: str


class CollectiveTimes:
    """Estimates collectives of one GPU model on one fabric, from the package's logs by default."""

    def __init__(
        self, gpu: GpuSpec, fabric: Fabric, logs: pd.DataFrame | None = None, *, nccl: Settings | None = None
    ) -> None:
        self.fabric = fabric
        self._nccl = Settings() if nccl is None else nccl
        table = load_collectives() if logs is None else logs
        name = _nearest(gpu, [str(product) for product in table.loc[table["nodes"] == 1, "gpu"].unique()])
        self._curves = _own_curves(name) if logs is None else _curves(logs, name)
        joined = _interconnect(gpu, fabric.nvlink_bandwidth)
        measured = _interconnect(GPUS[name])
        alike = gpu.compute_capability == GPUS[name].compute_capability and joined == measured
        self._is_own = alike and (name in (gpu.name, gpu.like) or joined.nvlink)
        network = Network(fabric.nic_bandwidth, fabric.nics_per_node / fabric.gpus_per_node)
        self._interconnect = joined
        self._tuner = Tuner(joined, network, self._nccl)
        self._limited = Tuner(joined, network, self._nccl, counts_channels=True)
        self._free = Tuner(joined, network, Settings())
        self._measured = Tuner(measured, network, Settings())
        self.of_libraries = [part.LibraryTimes(gpu, self._own_nic()) for part in extras.parts("library_times")]

    def time(self, operation: str, num_bytes: float, shape: GroupShape) -> CollectiveTime:
        """The time of one call.

        Operations: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, barrier, gather, scatter,
        send. ``num_bytes`` are the whole buffer's: all_gather's result, reduce_scatter's input, one rank's part of
        all_to_all.
        """
        if shape.size == 1:
            return CollectiveTime(0.0, "none", "", 0.0, 0.0, "")
        num_bytes = max(float(num_bytes), _LEAST_BYTES)
        if operation == "get":
            return self._copied(num_bytes, shape)
        chosen = self._tuner.choose(operation, num_bytes, shape)
        # A barrier is an all_reduce of one value.
        name = "all_reduce" if operation == "barrier" else _SAME.get(operation, operation)
        if shape.num_nodes == 1:
            time_us, spread, basis = self._in_domain(name, num_bytes, shape.size)
        else:
            time_us = self._between(name, num_bytes, shape)
            basis = "fitted"
            is_small = num_bytes < _MEASURED_BYTES and operation != "send"
            spread = max(self.fabric.spread, _SMALL_SPREAD if is_small else 0.0)
            # What crosses nodes crosses each node, too: more nodes are never faster. Without NVLink, that counts.
            ranks = min(shape.size, max(self.fabric.gpus_per_node, 2))
            inside_us, inside_spread, inside_basis = self._in_domain(name, num_bytes, ranks)
            if inside_us > time_us:
                time_us = inside_us
                spread = max(spread, inside_spread)
                basis = f"{inside_basis}, as in one node"
        if self._nccl != Settings():
            slower, whole_us = self._slower(operation, num_bytes, shape, chosen)
            if slower != 1 or whole_us > time_us:
                time_us = max(time_us, whole_us) * slower
                spread = max(spread, _COUNT_SPREAD)
                basis = f"{basis}, and NCCL's tuner"
        share = min(self._transfer_us(name, num_bytes, shape) / time_us, 1.0)
        return CollectiveTime(time_us, chosen.algorithm, chosen.protocol, spread, share, basis)

    def _copied(self, num_bytes: float, shape: GroupShape) -> CollectiveTime:
        """A copy from another GPU's memory. Over nodes there is none; without NVLink it goes over PCIe."""
        if shape.num_nodes > 1:
            return CollectiveTime(math.nan, "", "", math.nan, 0.0, "")
        transfer = num_bytes / (self._interconnect.bandwidth * _COPY_ACHIEVED) * 1e6
        spread = _COUNT_SPREAD if self._interconnect.nvlink else _PCIE_SPREAD
        time_us = _COPY_US + transfer
        return CollectiveTime(time_us, "copy", "", spread, transfer * _COPY_ACHIEVED / time_us, "measured")

    def _transfer_us(self, name: str, num_bytes: float, shape: GroupShape) -> float:
        if shape.num_nodes > 1 and name in ("send", "all_to_all"):
            remote = num_bytes if name == "send" else num_bytes * (shape.size - shape.local) / shape.size
            return remote / (self._own_nic() * self.fabric.achieved) * 1e6
        if shape.num_nodes > 1:
            passes = 2 if name == "all_reduce" else 1
            return passes * num_bytes * (shape.size - 1) / shape.size / self._bandwidth(shape) * 1e6
        if name == "send":
            return num_bytes / self._interconnect.bandwidth * 1e6
        largest = self._curves[name].largest
        return num_bytes / largest * self._in_domain(name, largest, shape.size)[0]

    def within_sms(self, estimate: CollectiveTime, num_bytes: float, num_sms: int) -> CollectiveTime:
        """The time of a kernel that moves so many bytes with so many SMs, each at most what a channel of NCCL does."""
        least = num_bytes / (max(num_sms, 1) * self._tuner.channel_bandwidth) * 1e6
        if least <= estimate.time_us:
            return estimate
        share = estimate.link_share * estimate.time_us / least
        return replace(estimate, time_us=least, link_share=share, spread=max(estimate.spread, _COUNT_SPREAD))

    def link_bandwidth(self, shape: GroupShape) -> float:
        """Bytes per second of what joins one GPU to the other nodes of a group, or to the other GPUs of its node."""
        return self._own_nic() if shape.num_nodes > 1 else self._interconnect.bandwidth

    def _own_nic(self) -> float:
        """Bandwidth of the NIC of one GPU, or of its part of one."""
        return self.fabric.nic_bandwidth * self.fabric.nics_per_node / self.fabric.gpus_per_node

    def _slower(self, kind: str, num_bytes: float, shape: GroupShape, chosen: Candidate) -> tuple[float, float]:
        """The effect of the settings: a factor, and the time of the collective without NVLink SHARP, or 0."""
        cost_us = self._limited.cost_us(chosen, kind, num_bytes, shape)
        usual = self._free.choose(kind, num_bytes, shape)
        whole_us = 0.0
        if usual.algorithm == "nvls" and chosen.algorithm != "nvls" and kind in ("all_reduce", "barrier"):
            # Rings in one domain were measured: a reduce_scatter and an all_gather, with one start.
            parts = [self._in_domain(name, num_bytes, shape.size)[0] for name in ("reduce_scatter", "all_gather")]
            whole_us = sum(parts) - self._in_domain("reduce_scatter", _LEAST_BYTES, shape.size)[0]
            others = self._free.candidates(kind, num_bytes, shape)
            usual = min((choice for choice in others if choice.algorithm == "ring"), key=lambda choice: choice.time_us)
        return max(cost_us / usual.time_us, 1.0), whole_us

    def _in_domain(self, name: str, num_bytes: float, size: int) -> tuple[float, float, str]:
        """Microseconds in one domain with NCCL's own choice, the interval, and what they rest on."""
        # Over PCIe, a send moves what an all_to_all of two moves.
        curve = self._curves["all_to_all" if name == "send" else name]
        if name == "send":
            num_bytes = 2 * num_bytes
            size = 2
        spread = curve.spread(size)
        basis = "measured" if curve.reaches(size) else "measured, and NCCL's tuner"
        if not curve.reaches(size) and not self._interconnect.nvlink:
            spread = _PCIE_SPREAD
        if not self._is_own:
            spread = _OTHERS_SPREAD if self._interconnect.nvlink else _PCIE_SPREAD
            basis = "measured, and NCCL's tuner"
        if name == "send" and self._interconnect.nvlink:
            return _SEND_US + num_bytes / 2 / (self._interconnect.bandwidth * _SEND_ACHIEVED) * 1e6, spread, basis
        name = "all_to_all" if name == "send" else name

        def measured_us(num_gpus: int) -> float:
            return self._measured.choose(name, num_bytes, GroupShape(num_gpus, 1, num_gpus)).time_us

        time_us = curve.time_us(num_bytes, size, measured_us)
        if not self._is_own:
            time_us *= self._free.choose(name, num_bytes, GroupShape(size, 1, size)).time_us / measured_us(size)
        return time_us, spread, basis

    def _between(self, name: str, num_bytes: float, shape: GroupShape) -> float:
        fabric = self.fabric
        if name == "send":
            gain = np.interp(math.log(max(self._nccl.net_chunk_bytes, 1)), np.log(_SEND_CHUNKS), _SEND_GAIN)
            most = max(self.fabric.nic_bandwidth * self.fabric.achieved, self.fabric.send_bandwidth)
            return fabric.send_us + num_bytes / float(min(self.fabric.send_bandwidth * gain, most)) * 1e6
        if name == "all_to_all":
            remote = num_bytes * (shape.size - shape.local) / shape.size
            transfer = remote / (self._own_nic() * fabric.achieved * _ALL_TO_ALL_ACHIEVED) * 1e6
            return _ALL_TO_ALL_US + _PEER_US * (shape.size - 1) + transfer
        if name == "all_reduce":
            return min(self._ring_us(num_bytes, shape, 2), self._tree_us(num_bytes, shape))
        return self._ring_us(num_bytes, shape, 1)

    def _ring_us(self, num_bytes: float, shape: GroupShape, passes: int) -> float:
        # The second pass of an all_reduce follows the first through the node at once, so it pays the network's steps
        # alone: ten nodes of eight take as long for an all_reduce's steps as for an all_gather's.
        between = passes * (shape.num_nodes - 1)
        within = shape.size - shape.num_nodes
        transfer = passes * num_bytes * (shape.size - 1) / shape.size / self._bandwidth(shape) * 1e6
        simple = between * self.fabric.hop_us + within * self.fabric.local_hop_us + transfer
        scale = _TUNER_LATENCY * self.fabric.hop_us / 9.0
        quick = [
            scale * (call + within * local + between * hop) + transfer / fraction
            for call, local, hop, fraction in _QUICK
        ]
        return min(simple, *quick)

    def _tree_us(self, num_bytes: float, shape: GroupShape) -> float:
        hops = 2 * math.log2(shape.num_nodes) * self.fabric.tree_hop_us
        within = 2 * (shape.local - 1) * self.fabric.local_hop_us
        # A tree moves each byte up and down: an all_reduce's algorithm bandwidth is half of the links'.
        return hops + within + 2 * num_bytes / (0.8 * self._bandwidth(shape)) * 1e6

    def _bandwidth(self, shape: GroupShape) -> float:
        """Bytes per second of a ring over nodes: the NICs of the node with the fewest ranks, or NVLink."""
        fabric = self.fabric
        nics = max(min(shape.local * fabric.nics_per_node / fabric.gpus_per_node, fabric.nics_per_node), 1.0)
        network = nics * fabric.nic_bandwidth * fabric.achieved
        if shape.local == 1:
            return network
        largest = self._curves["all_gather"].largest
        alone_us = self._in_domain("all_gather", largest, shape.local)[0]
        nvlink = largest * (shape.local - 1) / shape.local / alone_us * 1e6
        return float((network**-_SHARPNESS + nvlink**-_SHARPNESS) ** (-1 / _SHARPNESS))


def symmetric_time(nccl: CollectiveTime) -> CollectiveTime:
    """The time of a kernel of symmetric memory or user buffers, given NCCL's for the same collective.

    None was measured. It takes at least as long as its bytes keep the links busy, and at most as long as NCCL's.
    Scripts choose it to be faster. The estimate is between the two, which are its interval.
    """
    least = min(max(nccl.time_us * nccl.link_share, _KERNEL_US), nccl.time_us)
    if not least:
        return nccl
    time_us = math.sqrt(least * nccl.time_us)
    share = min(nccl.time_us * nccl.link_share / time_us, 1.0)
    spread = math.log(nccl.time_us / least) / 2 + nccl.spread
    return CollectiveTime(time_us, "kernel", "", spread, share, nccl.basis)


class _MessageCurve:
    """Measured times of one operation in one NVLink domain."""

    def __init__(self, rows: pd.DataFrame) -> None:
        self._by_size: dict[int, tuple[Floats, Floats]] = {}
        for size, own in rows.groupby("gpus_per_node"):
            median = own.groupby("bytes")["time_us"].median()
            self._by_size[int(str(size))] = (median.index.to_numpy(np.float64), _rising(median.to_numpy(np.float64)))
        self._sizes = sorted(self._by_size)

    def time_us(self, num_bytes: float, size: int, tuner_us: Callable[[int], float]) -> float:
        """Microseconds of a message between ``size`` GPUs, measured or interpolated between numbers of GPUs.

        Beyond the most that were measured, ``tuner_us`` (the tuner's estimate by number of GPUs) scales those.
        """
        most = self._sizes[-1]
        if size > most:
            return self._measured_us(num_bytes, most) * tuner_us(size) / tuner_us(most)
        sizes = np.log(self._sizes)
        times = np.log([self._measured_us(num_bytes, num_gpus) for num_gpus in self._sizes])
        return math.exp(float(np.interp(math.log(size), sizes, times)))

    def reaches(self, size: int) -> bool:
        """True if as many GPUs were measured."""
        return size <= self._sizes[-1]

    def spread(self, size: int) -> float:
        """The 90 % interval for a number of GPUs, see ``CollectiveTime.spread``."""
        if size in self._by_size:
            return _DOMAIN_SPREAD
        return _COUNT_SPREAD if size <= 2 * self._sizes[-1] else _FAR_SPREAD

    @cached_property
    def largest(self) -> float:
        """Bytes of the largest message."""
        return float(max(sizes[-1] for sizes, _ in self._by_size.values()))

    def _measured_us(self, num_bytes: float, size: int) -> float:
        sizes, times = self._by_size[size]
        if num_bytes > sizes[-1]:
            return float(times[-1] * num_bytes / sizes[-1])
        log_us = np.interp(math.log(num_bytes), np.log(sizes), np.log(times))
        return float(math.exp(log_us))


@cache
def _own_curves(gpu: str) -> dict[str, _MessageCurve]:
    """The curves of the package's logs."""
    return _curves(load_collectives(), gpu)


def _curves(logs: pd.DataFrame, gpu: str) -> dict[str, _MessageCurve]:
    own = logs[(logs["nodes"] == 1) & (logs["gpu"] == gpu)]
    return {str(operation): _MessageCurve(rows) for operation, rows in own.groupby("operation")}


def _rising(times: Floats) -> Floats:
    """Times of growing messages without noise: the mean of the tightest curves around them that never fall."""
    above = np.maximum.accumulate(times)
    below = np.minimum.accumulate(times[::-1])[::-1]
    return np.asarray(np.sqrt(above * below))


def _nearest(gpu: GpuSpec, measured: Sequence[str]) -> str:
    """The measured GPU model whose collectives stand for a GPU's: itself, or the one whose links are most alike."""
    if (gpu.like or gpu.name) in measured:
        return gpu.like or gpu.name
    own = gpu.nvlink_bandwidth or gpu.host_bandwidth

    def unlike(name: str) -> tuple[bool, int, float]:
        other = GPUS[name]
        generations = abs(gpu.compute_capability[0] - other.compute_capability[0])
        bandwidth = other.nvlink_bandwidth or other.host_bandwidth
        return bool(gpu.nvlink_bandwidth) != bool(other.nvlink_bandwidth), generations, abs(math.log(own / bandwidth))

    return min(measured, key=unlike)


def _interconnect(gpu: GpuSpec, nvlink_bandwidth: float = 0.0) -> Interconnect:
    bandwidth = nvlink_bandwidth or gpu.nvlink_bandwidth
    return interconnect_like(gpu.product, gpu.compute_capability[0], bandwidth, gpu.host_bandwidth)
