"""The interconnect of a cluster: NVLink inside a node, NICs between nodes. Bandwidths are bytes per second, one way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from fakedist.bounded import UnreadableError, read_toml
from fakedist.errors import JobError
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
