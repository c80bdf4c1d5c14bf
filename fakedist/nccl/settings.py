"""Settings from NCCL's environment variables, for its time and its memory. Defaults are those of NCCL 2.28 to 2.30."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fakedist.run.nccl import number

KIB, MIB = 1 << 10, 1 << 20
MAX_CHANNELS = 64  # MAXCHANNELS, src/include/device.h

#: DEFAULT_LL_BUFFSIZE and its siblings (src/init.cc): 8 lines x 512 threads x 8 steps x 16 B; 120 x 640 x 8 x 8 B.
LL_BYTES = 8 * 512 * 8 * 16
LL128_BYTES = 120 * 640 * 8 * 8
SIMPLE_BYTES = 4 * MIB
#: Variables that the times of collectives follow. Of these, the number of channels changes only the SMs they hold.
CHANNEL_VARIABLES = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
TIME_VARIABLES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_P2P_NET_CHUNKSIZE", *CHANNEL_VARIABLES)
_ALGORITHMS = ("ring", "tree", "nvls", "nvlstree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")


@dataclass(frozen=True)
class Settings:
    """The settings that affect memory or time.

    Attributes:
        ll_bytes: Buffer of protocol LL, per connection.
        ll128_bytes: The same for LL128.
        simple_bytes: The same for Simple.
        channels: Minimum and maximum channels for collectives.
        p2p_channels: Minimum and maximum channels for send and receive.
        per_net_peer: Channels to each peer in another node; None lets NCCL choose.
        net_chunk_bytes: Chunk of send and receive in a group of several nodes.
        nvlink_chunk_bytes: The same over NVLink in one node.
        pci_chunk_bytes: The same over PCIe.
        nvls: Whether NVLink SHARP may be used.
        nvls_channels: Channels of NVLink SHARP; None for the GPU's default.
        nvls_chunk_bytes: Chunk of NVLink SHARP.
        algorithms: Names that NCCL_ALGO allows.
        protocols: Names that NCCL_PROTO allows.
        p2p: Whether GPUs of one node may access each other's memory.
        cumem: Whether device memory comes from cuMemCreate, in steps of 2 MiB.
        lazy: Whether an algorithm connects only when it is first used (since NCCL 2.22).
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
    algorithms: frozenset[str] = frozenset(_ALGORITHMS)
    protocols: frozenset[str] = frozenset(_PROTOCOLS)
    p2p: bool = True
    cumem: bool = True
    lazy: bool = True


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the settings from an environment.

    Args:
        environment: NCCL_* variables. Others are ignored.
    """

    def read(name: str, default: int) -> int:
        found = number(environment, f"NCCL_{name}")
        return default if found is None or found < 0 else found

    cumem = read("CUMEM_ENABLE", 1) != 0
    algorithms = _allowed(environment.get("NCCL_ALGO", ""), _ALGORITHMS)
    if read("PAT_ENABLE", 2) == 0:
        algorithms -= {"pat"}
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
        algorithms=algorithms,
        protocols=_allowed(environment.get("NCCL_PROTO", ""), _PROTOCOLS),
        p2p=read("P2P_DISABLE", 0) == 0,
        cumem=cumem,
        lazy=cumem and read("RUNTIME_CONNECT", 1) != 0,
    )


def _allowed(text: str, known: tuple[str, ...]) -> frozenset[str]:
    """Names of a list: "Ring,Tree" or "^Tree". A list per operation ("allreduce:ring;...") counts as all names."""
    names, every = frozenset(re.findall(r"[a-z]+[0-9]*", text.lower())), frozenset(known)
    if not names or ":" in text:
        return every
    return every - names if text.strip().startswith("^") else every & names
