"""What the host takes for its part of a step. Published for other hosts; the job's own may be half or twice as fast."""

from __future__ import annotations

from dataclasses import dataclass


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
