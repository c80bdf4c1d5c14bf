"""How many channels NCCL opens between GPUs of a kind: it searches the machine's topology, so this is data.

Channels are those of published logs (NCCL_DEBUG=INFO: "24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p
channels per peer"). Of groups with one rank a node no log was found: from what ``ncclTopoPostset`` makes of one NIC a
GPU (one channel found, doubled, and once more on Hopper and newer) to as many as twice that many NICs would give.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fakedist.analysis.outside.span import Span, exactly


@dataclass(frozen=True)
class Fabric:
    """What joins the GPUs of a kind.

    Attributes:
        name: In words.
        node: Channels for collectives of a group inside of one node.
        nodes: The same for several nodes with several of the group's ranks each.
        rails: The same for several nodes with one rank each.
        per_peer: Channels for send and receive to each peer, inside of one node.
        nvls: Channels of NVLink SHARP, inside of one node and over several; (0, 0) without it.
        reads: Whether the receiver fetches: the sender then holds the buffer of protocol Simple.
        nvlink: Whether NVLink joins them.
    """

    name: str
    node: Span
    nodes: Span
    rails: Span
    per_peer: Span
    nvls: tuple[int, int] = (0, 0)
    reads: bool = False
    nvlink: bool = True


#: node: nccl-tests#100 ("Channel 23/24" on an HGX A100). nodes: NCCL#1412 ("Channel 00/08", 2 nodes of 8), 16 with a
#: NIC for each GPU. per_peer: 32 through NVSwitch, 8 with four GPUs joined directly (ncclTopoGetNchannels: twice the
#: links of the path). reads: ncclTopoCheckP2p, for compute capability 8.0 and NVLink alone.
AMPERE = Fabric("NVLink 3", exactly(24), Span(8, 16), Span(2, 4), Span(8, 32), reads=True)
#: node: logs of nccl-tests on 8 H100 (24 coll, 16 nvls, 32 p2p, 32 a peer), NCCL#1685 (32 a peer). nodes: NCCL#1453
#: ("Channel 00/16", 3 nodes of 8), NCCL#1713 (8 trees, 2 nodes of 2). nvls: NVLS_NCHANNELS_SM90.
HOPPER = Fabric("NVLink 4", exactly(24), Span(8, 16), Span(2, 8), exactly(32), nvls=(16, 16))
#: node: logs on B200 and B300 (32 coll, 24 nvls, 32 p2p, 32 a peer). nvls: NVLS_NCHANNELS_SM100_NVL and _SM100.
#: No log of several nodes was found: what is known of Hopper, up to as many as in one node.
BLACKWELL = Fabric("NVLink 5", exactly(32), Span(8, 32), Span(2, 16), exactly(32), nvls=(24, 32))
#: NCCL#1706 (4 coll, 4 p2p, 2 a peer), NCCL#1189.
PCIE = Fabric("PCIe", Span(2, 4), Span(2, 4), Span(2, 4), exactly(2), nvlink=False)

_FABRICS = (
    (r"A100-SXM", AMPERE),
    (r"H100 80GB HBM3|H200\b(?! NVL)", HOPPER),
    (r"NVIDIA B200|NVIDIA B300", BLACKWELL),
    (r"\bL40S?\b|GeForce RTX (3060|40\d\d)|\bL4\b|\bA10\b", PCIE),
)


def find_fabric(gpu_name: str) -> Fabric | None:
    """What joins the GPUs called ``gpu_name`` by CUDA; None where it is not known.

    GB200 is not: its NVLink joins up to 72 GPUs of many nodes, as the cluster has them. Nor are cards that a
    bridge may join in pairs (H100 NVL, RTX A6000), and GPUs with fewer links (H800, A800).
    """
    return next((fabric for pattern, fabric in _FABRICS if re.search(pattern, gpu_name)), None)
