"""Settings from NCCL's environment variables, for its time and its memory. Defaults are those of NCCL 2.28 to 2.30."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fakedist.rundir.environment import number

KIB, MIB = 1 << 10, 1 << 20
MAX_CHANNELS = 64  # MAXCHANNELS, src/include/device.h

#: DEFAULT_LL_BUFFSIZE and its siblings (src/init.cc): 8 lines x 512 threads x 8 steps x 16 B; 120 x 640 x 8 x 8 B.
LL_BYTES = 8 * 512 * 8 * 16
LL128_BYTES = 120 * 640 * 8 * 8
SIMPLE_BYTES = 4 * MIB
#: Variables that the times of collectives follow.
TIME_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_NET_CHUNKSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_PAT_ENABLE",
)
#: The version whose sources this model follows.
NEWEST = (2, 30)
ALGORITHMS = ("ring", "tree", "nvls", "nvlstree", "pat")
#: NCCL's names of collectives, and ours.
_FUNCTIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True)
class Nccl:
    """NCCL as a job loads it: its variables, and its version ("2.27.5"; empty if not known)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = ""


@dataclass(frozen=True)
class Settings:
    """The settings that affect memory or time.

    Attributes:
        ll_bytes, ll128_bytes, simple_bytes: Buffers of the protocols, per connection.
        channels: Minimum and maximum for collectives.
        p2p_channels: Minimum and maximum for send and receive.
        per_net_peer: Channels to each peer in another node; None lets NCCL choose.
        net_chunk_bytes: Chunk of send and receive in a group of several nodes.
        nvlink_chunk_bytes: The same over NVLink in one node.
        pci_chunk_bytes: The same over PCIe.
        nvls_channels: None for the GPU's default.
        algorithms: Names that NCCL_ALGO allows, by collective; one that is not in it may use all.
        protocols: The same for NCCL_PROTO.
        p2p: GPUs of one node may access each other's memory.
        cumem: Device memory comes from cuMemCreate, in steps of 2 MiB.
        lazy: An algorithm connects when it is first used (since NCCL 2.22).
        version: NCCL's, major and minor.
    """

    ll_bytes: int = LL_BYTES
    ll128_bytes: int = LL128_BYTES
    simple_bytes: int = SIMPLE_BYTES
    channels: tuple[int, int] = (1, MAX_CHANNELS)
    p2p_channels: tuple[int, int] = (1, MAX_CHANNELS)
    per_net_peer: int | None = None
    net_chunk_bytes: int = 128 * KIB
    nvlink_chunk_bytes: int = 512 * KIB
    pci_chunk_bytes: int = 128 * KIB
    nvls: bool = True
    nvls_channels: int | None = None
    nvls_chunk_bytes: int = 128 * KIB
    algorithms: Mapping[str, frozenset[str]] = field(default_factory=dict)
    protocols: Mapping[str, frozenset[str]] = field(default_factory=dict)
    pat: bool = True
    p2p: bool = True
    cumem: bool = True
    lazy: bool = True
    version: tuple[int, int] = NEWEST

    def algorithms_of(self, collective: str) -> frozenset[str]:
        """Names of the algorithms that may run a collective: all_reduce, all_gather, ..."""
        allowed = self.algorithms.get(collective, frozenset(ALGORITHMS))
        return allowed if self.pat else allowed - {"pat"}

    def protocols_of(self, collective: str) -> frozenset[str]:
        """Names of the protocols that may run a collective."""
        return self.protocols.get(collective, frozenset(PROTOCOLS))


def read_settings(nccl: Nccl) -> Settings:
    """Read the settings from NCCL's variables and version."""
    environment = nccl.environment

    def read(name: str, default: int) -> int:
        value = number(environment, f"NCCL_{name}")
        return default if value is None or value < 0 else value

    cumem = read("CUMEM_ENABLE", 1) != 0
    return Settings(
        ll_bytes=read("LL_BUFFSIZE", LL_BYTES),
        ll128_bytes=read("LL128_BUFFSIZE", LL128_BYTES),
        simple_bytes=read("BUFFSIZE", SIMPLE_BYTES),
        channels=(
            max(read("MIN_NCHANNELS", 1), read("MIN_CTAS", 1), 1),
            max(min(read("MAX_NCHANNELS", MAX_CHANNELS), read("MAX_CTAS", MAX_CHANNELS), MAX_CHANNELS), 1),
        ),
        p2p_channels=(max(read("MIN_P2P_NCHANNELS", 1), 1), max(read("MAX_P2P_NCHANNELS", MAX_CHANNELS), 1)),
        per_net_peer=read("NCHANNELS_PER_NET_PEER", 0) or None,
        net_chunk_bytes=read("P2P_NET_CHUNKSIZE", 128 * KIB),
        nvlink_chunk_bytes=read("P2P_NVL_CHUNKSIZE", 512 * KIB),
        pci_chunk_bytes=read("P2P_PCI_CHUNKSIZE", 128 * KIB),
        nvls=read("NVLS_ENABLE", 2) != 0,
        nvls_channels=read("NVLS_NCHANNELS", 0) or None,
        nvls_chunk_bytes=read("NVLS_CHUNKSIZE", 128 * KIB),
        algorithms=_allowed(environment.get("NCCL_ALGO", ""), ALGORITHMS),
        protocols=_allowed(environment.get("NCCL_PROTO", ""), PROTOCOLS),
        pat=read("PAT_ENABLE", 2) != 0,
        p2p=read("P2P_DISABLE", 0) == 0,
        cumem=cumem,
        lazy=cumem and read("RUNTIME_CONNECT", 1) != 0,
        version=_version(nccl.version),
    )


def _version(text: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return NEWEST if numbers is None else (int(numbers[1]), int(numbers[2]))


def _allowed(text: str, known: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Names by collective, of "Ring,Tree", "^Tree" or "ring;allreduce:tree,nvls" (``parseList``).

    A name that is not known (CollNet's) allows nothing here. A list without any known name counts as not given.
    """
    allowed_by_collective: dict[str, frozenset[str]] = {}
    every = frozenset(known)
    for part in text.lower().split(";"):
        prefix, _, listed = part.rpartition(":")
        names = every & frozenset(re.findall(r"[a-z]+[0-9]*", listed))
        if names:
            allowed = every - names if listed.strip().startswith("^") else names
            collectives = [_FUNCTIONS.get(prefix.strip(), "")] if prefix else list(_FUNCTIONS.values())
            allowed_by_collective |= dict.fromkeys(collectives, allowed)
    return allowed_by_collective


#: The beginning of a call's operation -> the collective that it is, and the side whose bytes are the whole buffer.
#: The first match counts.
_KINDS = (
    ("reduce_scatter", "reduce_scatter", "bytes_in"),
    ("all_gather", "all_gather", "bytes_out"),
    ("allgather", "all_gather", "bytes_out"),
    ("all_reduce", "all_reduce", "bytes_in"),
    ("allreduce", "all_reduce", "bytes_in"),
    ("all_to_all", "all_to_all", "largest"),
    ("alltoall", "all_to_all", "largest"),
    ("deep_ep_layout", "", "largest"),
    ("deep_ep_", "all_to_all", "largest"),
    ("hybrid_ep_dispatch", "all_to_all", "largest"),
    ("hybrid_ep_combine", "all_to_all", "largest"),
    ("broadcast", "broadcast", "largest"),
    ("reduce", "reduce", "largest"),
    ("gather", "gather", "largest"),
    ("scatter", "scatter", "largest"),
    ("send", "send", "largest"),
    ("recv", "send", "largest"),
    ("get", "get", "largest"),
    ("put", "get", "largest"),
    ("barrier", "barrier", "largest"),
    ("monitored_barrier", "barrier", "largest"),
)


#: Kernels of torch.ops.symm_mem and of Transformer Engine's user buffers, which take or write what is in the others'
#: memory, by the algorithm before their names.
_SYMMETRIC = re.compile(r"(?:symm_mem_|userbuffers_)(?:multimem_)?(?:one_shot_|two_shot_)?")
#: Calls through memory that ranks share: NCCL has no part in them.
THROUGH_SHARED_MEMORY = r"get|put|put_wait|symm_mem_\w+|userbuffers_\w+|(deep|hybrid)_ep_\w+"


def collective_of(operation: str, bytes_in: int, bytes_out: int) -> tuple[str, int]:
    """The collective of an operation such as all_gather_into_tensor_coalesced ("": unknown), and its buffer's bytes."""
    sizes = {"bytes_in": bytes_in, "bytes_out": bytes_out, "largest": max(bytes_in, bytes_out)}
    name = _SYMMETRIC.sub("", operation)
    return next(
        ((kind, sizes[side]) for prefix, kind, side in _KINDS if name.startswith(prefix)),
        ("", sizes["largest"]),
    )
