"""The facts about a GPU model. Plain values only: a run directory holds the whole model of its run."""

from __future__ import annotations

from dataclasses import dataclass

from fakedist.units import KIB

#: How the name of a GPU file ends.
GPU_FILE_ENDING = ".toml"

#: Scales launch queues, if it is set when CUDA begins.
LAUNCH_QUEUES = "CUDA_SCALE_LAUNCH_QUEUES"
#: Launches of one stream of which the GPU has not ended: the host stops at the next one. Measured on an H200 (driver
#: 580.159.04) behind a kernel of half a second, for each of two streams, kernels, fills, copies and CUDA graphs of 20
#: kernels alike; 20,000 events did not stop it.
QUEUE_DEPTH = 1022
#: What CUDA_SCALE_LAUNCH_QUEUES makes of it, measured in the same way. CUDA takes any other value for 1x.
_QUEUE_DEPTHS = {"0.25x": 254, "0.5x": 510, "2x": 2046, "4x": 4094}


def queue_depth(scale: str) -> int:
    """The depth of a launch queue with a value of CUDA_SCALE_LAUNCH_QUEUES."""
    return _QUEUE_DEPTHS.get(scale, QUEUE_DEPTH)


@dataclass(frozen=True)
class Architecture:
    """The limits of all GPUs of one compute capability.

    Source: CUDA C++ Programming Guide, tables "Technical Specifications per Compute Capability".

    Attributes:
        compute_capability: Major and minor.
        shared_per_block_optin: The most shared memory that a block may ask for, in bytes.
        shared_per_sm: Shared memory per SM, in bytes.
        threads_per_sm: Resident threads per SM.
        blocks_per_sm: Resident blocks per SM.
    """

    compute_capability: tuple[int, int]
    shared_per_block_optin: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int


#: By compute capability, as text.
ARCHITECTURES = {
    "8.0": Architecture((8, 0), 163 * KIB, 164 * KIB, 2048, 32),
    "8.9": Architecture((8, 9), 99 * KIB, 100 * KIB, 1536, 24),
    "9.0": Architecture((9, 0), 227 * KIB, 228 * KIB, 2048, 32),
    "10.0": Architecture((10, 0), 227 * KIB, 228 * KIB, 2048, 32),
    "10.3": Architecture((10, 3), 227 * KIB, 228 * KIB, 2048, 32),
    "12.0": Architecture((12, 0), 99 * KIB, 128 * KIB, 1536, 24),
}


#: Triton's and cuBLAS' names for products in single precision -> the type that tensor cores multiply, and how often.
_SEVERAL_PRODUCTS = {"tf32x3": ("tf32", 3), "bf16x3": ("bf16", 3), "bf16x6": ("bf16", 6), "bf16x9": ("bf16", 9)}
#: From this compute capability on, cuBLAS emulates single precision in bf16 (cuBLAS 12.9's documentation).
_EMULATES_SINGLE = (10, 0)


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        name: The name that ``--gpu`` takes; for a GPU file, the file's name without its ending.
        product: The name that CUDA reports.
        architecture: Its compute capability and the limits that come with it.
        memory_bytes: Total memory as CUDA reports it.
        sms: Streaming multiprocessors.
        clock_khz: Boost clock of the SMs.
        memory_clock_khz: Clock of the memory; twice this times the bus width is the bandwidth.
        memory_bus_bits: Width of the memory bus.
        l2_bytes: L2 cache.
        memory_bandwidth: Bytes per second.
        nvlink_bandwidth: Bytes per second in one direction; 0 without NVLink.
        host_bandwidth: Bytes per second of the link between host and GPU (PCIe x16 or NVLink-C2C), in one direction.
        watts: Power limit. Clocks fall under long matrix-product load so that it holds.
        peak_flops: Dense operations per second by dtype: fp64, fp32, tf32, bf16 (and fp16), fp8, int8. A dtype is
            absent if the GPU has no units for it. Where tensor cores have the type, the peak is theirs.
        like: The known model that a GPU file builds on; empty for a known model, and for a file that stands alone.
    """

    name: str
    product: str
    architecture: Architecture
    memory_bytes: int
    sms: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    l2_bytes: int
    memory_bandwidth: float
    nvlink_bandwidth: float
    host_bandwidth: float
    watts: float
    peak_flops: dict[str, float]
    like: str = ""

    def peak(self, dtype: str) -> float | None:
        """Operations per second in a type of ``WorkRow.dtype``; None if the GPU has no units for it.

        Products in single precision may be made of several in a narrower type, each of which counts.
        """
        if dtype == "bf16x9" and self.compute_capability < _EMULATES_SINGLE:
            dtype = "fp32"
        narrower, number = _SEVERAL_PRODUCTS.get(dtype, (dtype, 1))
        peak = self.peak_flops.get(narrower)
        return None if peak is None else peak / number

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self.architecture.compute_capability

    @property
    def can_multicast(self) -> bool:
        """Whether its NVSwitches multicast: those since Hopper's (NVLink SHARP)."""
        return self.nvlink_bandwidth > 0 and self.compute_capability >= (9, 0)

    def driver_fields(self) -> dict[str, int]:
        """The fields of the driver's ``struct gpu_model``, except name, memory, devices, versions and multicast."""
        return {
            "sms": self.sms,
            "clock_khz": self.clock_khz,
            "memory_clock_khz": self.memory_clock_khz,
            "memory_bus_bits": self.memory_bus_bits,
            "l2_bytes": self.l2_bytes,
            "shared_per_block": 48 * KIB,
            "shared_per_block_optin": self.architecture.shared_per_block_optin,
            "shared_per_sm": self.architecture.shared_per_sm,
            "registers_per_block": 65536,
            "registers_per_sm": 65536,
            "threads_per_sm": self.architecture.threads_per_sm,
            "blocks_per_sm": self.architecture.blocks_per_sm,
        }
