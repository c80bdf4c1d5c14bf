"""What the host takes for its part of a step. Published for other hosts, and without Python between operations."""

from __future__ import annotations

from dataclasses import dataclass

from fakedist.time.timeline import HostTimes

#: The host's time, least and most, over the estimate (90 % interval). A host may be twice as fast. A forward of
#: torch's Linear takes 13.5 us on a DGX H100, where 11 are counted, and 33 to 37 on Grace; Transformer Engine's takes
#: 91 to 100 there (NVIDIA/TransformerEngine#2053). Tests of Megatron-LM that the host limits take 4.6 to 6 times what
#: is counted (docs/accuracy.md).
HOST_RANGE = (0.5, 6.5)


@dataclass(frozen=True)
class HostCosts:
    """Microseconds of the host, each with its source. It implements ``fakedist.time.timeline.HostTimes``.

    Attributes:
        operation_us: An operation of torch, without its launches: 4 us (pytorch/pytorch#82793; 2 to 7 us in #41383).
        launch_us: A launch: 3 us (meta-pytorch/tritonbench#1017 gives 1.3 on x86 and 3.0 on GB200 for cuLaunchKernel).
        graph_us: A launch of a CUDA graph: 2.5 us (NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs"), and
        as
            much again for torch's replay, an assumption.
    """

    operation_us: float = 4.0
    launch_us: float = 3.0
    graph_us: float = 5.0


def scaled(host: HostTimes, factor: float) -> HostCosts:
    """A host that takes ``factor`` times as long for everything."""
    return HostCosts(host.operation_us * factor, host.launch_us * factor, host.graph_us * factor)
