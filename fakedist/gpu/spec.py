"""GPU models: what the virtual GPU reports about itself.

Sources. Architecture (SMs, shared memory, registers, threads, compute capability): CUDA C++ Programming Guide, tables
"Technical Specifications per Compute Capability", and NVIDIA's architecture whitepapers (A100, H100, Ada, Blackwell).
Bandwidth and dense peak FLOP/s: NVIDIA's data sheets, without sparsity. ``memory_bytes`` is what CUDA reports. No data
sheet gives it: it is smaller than the nominal size by ECC and the driver's share, and differs by some MiB between
drivers. Where it is given to the byte, it and the L2 cache are what CUDA reported to XLA on that GPU (openxla/xla,
xla/backends/gpu/target_config/specs). Elsewhere it is the "total capacity" in torch's out-of-memory messages on that
GPU, to two decimals of GiB. ``--gpu-memory`` overrides it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from fakedist.errors import JobError

GIB = 1 << 30
KIB = 1 << 10


@dataclass(frozen=True)
class Architecture:
    """What all GPUs of one compute capability share.

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


AMPERE = Architecture((8, 0), 163 * KIB, 164 * KIB, 2048, 32)
ADA = Architecture((8, 9), 99 * KIB, 100 * KIB, 1536, 24)
HOPPER = Architecture((9, 0), 227 * KIB, 228 * KIB, 2048, 32)
BLACKWELL = Architecture((10, 0), 227 * KIB, 228 * KIB, 2048, 32)
BLACKWELL_ULTRA = Architecture((10, 3), 227 * KIB, 228 * KIB, 2048, 32)
BLACKWELL_RTX = Architecture((12, 0), 99 * KIB, 128 * KIB, 1536, 24)


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model.

    Attributes:
        name: The name that ``--gpu`` takes.
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
        peak_flops: Dense operations per second by dtype: fp64, fp32, tf32, bf16 (and fp16), fp8, int8. A dtype is
            absent if the GPU has no units for it. Where tensor cores have the type, the peak is theirs.
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
    peak_flops: dict[str, float]

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self.architecture.compute_capability

    def driver_fields(self) -> dict[str, int]:
        """The fields of the driver's ``struct gpu_model``, except name, memory, devices and versions."""
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


def _gib(text: float) -> int:
    return int(text * GIB) // (1 << 20) * (1 << 20)


_HOPPER_FLOPS = {"fp64": 66.9e12, "fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp8": 1978.9e12} | {
    "int8": 1978.9e12
}
_AMPERE_FLOPS = {"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "int8": 624e12}
_PCIE_4, _PCIE_5, _PCIE_6, _NVLINK_C2C = 31.5e9, 63e9, 126e9, 450e9
_MIB = 1 << 20

GPUS: dict[str, GpuSpec] = {
    spec.name: spec
    for spec in (
        GpuSpec(
            name="a100-40g",
            product="NVIDIA A100-SXM4-40GB",
            architecture=AMPERE,
            memory_bytes=42_298_834_944,
            sms=108,
            clock_khz=1_410_000,
            memory_clock_khz=1_215_000,
            memory_bus_bits=5120,
            l2_bytes=40 * _MIB,
            memory_bandwidth=1.555e12,
            nvlink_bandwidth=300e9,
            host_bandwidth=_PCIE_4,
            peak_flops=_AMPERE_FLOPS,
        ),
        GpuSpec(
            name="a100-80g",
            product="NVIDIA A100-SXM4-80GB",
            architecture=AMPERE,
            memory_bytes=_gib(79.25),
            sms=108,
            clock_khz=1_410_000,
            memory_clock_khz=1_593_000,
            memory_bus_bits=5120,
            l2_bytes=40 * _MIB,
            memory_bandwidth=2.039e12,
            nvlink_bandwidth=300e9,
            host_bandwidth=_PCIE_4,
            peak_flops=_AMPERE_FLOPS,
        ),
        GpuSpec(
            name="h100-80g",
            product="NVIDIA H100 80GB HBM3",
            architecture=HOPPER,
            memory_bytes=84_942_979_072,
            sms=132,
            clock_khz=1_980_000,
            memory_clock_khz=2_619_000,
            memory_bus_bits=5120,
            l2_bytes=50 * _MIB,
            memory_bandwidth=3.352e12,
            nvlink_bandwidth=450e9,
            host_bandwidth=_PCIE_5,
            peak_flops=_HOPPER_FLOPS,
        ),
        GpuSpec(
            name="h200",
            product="NVIDIA H200",
            architecture=HOPPER,
            memory_bytes=_gib(139.81),
            sms=132,
            clock_khz=1_980_000,
            memory_clock_khz=3_201_000,
            memory_bus_bits=6144,
            l2_bytes=60 * _MIB,  # torch.cuda.get_device_properties on an H200: L2_cache_size=60MB
            memory_bandwidth=4.8e12,
            nvlink_bandwidth=450e9,
            host_bandwidth=_PCIE_5,
            peak_flops=_HOPPER_FLOPS,
        ),
        GpuSpec(
            name="b200",
            product="NVIDIA B200",
            architecture=BLACKWELL,
            memory_bytes=191_514_411_008,
            sms=148,
            clock_khz=1_965_000,
            memory_clock_khz=3_996_000,
            memory_bus_bits=7680,
            l2_bytes=132_644_864,
            memory_bandwidth=7.672e12,
            nvlink_bandwidth=900e9,
            host_bandwidth=_PCIE_5,
            peak_flops={"fp64": 37e12, "fp32": 75e12, "tf32": 1.1e15, "bf16": 2.25e15, "fp8": 4.5e15, "int8": 4.5e15},
        ),
        GpuSpec(
            name="gb200",
            product="NVIDIA GB200",
            architecture=BLACKWELL,
            memory_bytes=197_897_748_480,
            sms=152,
            clock_khz=2_062_000,
            memory_clock_khz=3_996_000,
            memory_bus_bits=7936,
            l2_bytes=135_528_448,
            memory_bandwidth=7.928e12,
            nvlink_bandwidth=900e9,
            host_bandwidth=_NVLINK_C2C,
            peak_flops={"fp64": 40e12, "fp32": 80e12, "tf32": 1.25e15, "bf16": 2.5e15, "fp8": 5e15, "int8": 5e15},
        ),
        GpuSpec(
            name="b300",
            product="NVIDIA B300 SXM6 AC",
            architecture=BLACKWELL_ULTRA,
            memory_bytes=_gib(267.69),
            sms=148,
            clock_khz=1_965_000,
            memory_clock_khz=3_996_000,
            memory_bus_bits=7680,
            l2_bytes=132_644_864,
            memory_bandwidth=7.75e12,
            nvlink_bandwidth=900e9,
            host_bandwidth=_PCIE_6,
            peak_flops={"fp64": 1.2e12, "fp32": 75e12, "tf32": 1.1e15, "bf16": 2.25e15, "fp8": 4.5e15, "int8": 153e12},
        ),
        GpuSpec(
            name="gb300",
            product="NVIDIA GB300",
            architecture=BLACKWELL_ULTRA,
            memory_bytes=297_021_079_552,
            sms=152,
            clock_khz=2_070_000,
            memory_clock_khz=3_996_000,
            memory_bus_bits=7936,
            l2_bytes=135_528_448,
            memory_bandwidth=7.928e12,
            nvlink_bandwidth=900e9,
            host_bandwidth=_NVLINK_C2C,
            peak_flops={"fp64": 1.3e12, "fp32": 80e12, "tf32": 1.25e15, "bf16": 2.5e15, "fp8": 5e15, "int8": 165e12},
        ),
        GpuSpec(
            name="rtx-pro-6000",
            product="NVIDIA RTX PRO 6000 Blackwell Server Edition",
            architecture=BLACKWELL_RTX,
            memory_bytes=_gib(94.97),
            sms=188,
            clock_khz=2_430_000,
            memory_clock_khz=14_001_000,
            memory_bus_bits=512,
            l2_bytes=128 * _MIB,
            memory_bandwidth=1.792e12,
            nvlink_bandwidth=0.0,
            host_bandwidth=_PCIE_5,
            peak_flops={
                "fp64": 1.97e12,
                "fp32": 117e12,
                "tf32": 234e12,
                "bf16": 467.8e12,
                "fp8": 935.6e12,
                "int8": 935.6e12,
            },
        ),
        GpuSpec(
            name="l40s",
            product="NVIDIA L40S",
            architecture=ADA,
            memory_bytes=_gib(44.42),
            sms=142,
            clock_khz=2_520_000,
            memory_clock_khz=9_001_000,
            memory_bus_bits=384,
            l2_bytes=96 * _MIB,
            memory_bandwidth=0.864e12,
            nvlink_bandwidth=0.0,
            host_bandwidth=_PCIE_4,
            peak_flops={
                "fp64": 1.43e12,
                "fp32": 91.6e12,
                "tf32": 183e12,
                "bf16": 362e12,
                "fp8": 733e12,
                "int8": 733e12,
            },
        ),
        GpuSpec(
            name="rtx4090",
            product="NVIDIA GeForce RTX 4090",
            architecture=ADA,
            memory_bytes=_gib(23.64),
            sms=128,
            clock_khz=2_520_000,
            memory_clock_khz=10_501_000,
            memory_bus_bits=384,
            l2_bytes=72 * _MIB,
            memory_bandwidth=1.008e12,
            nvlink_bandwidth=0.0,
            host_bandwidth=_PCIE_4,
            peak_flops={
                "fp64": 1.29e12,
                "fp32": 82.6e12,
                "tf32": 82.6e12,
                "bf16": 165.2e12,
                "fp8": 330.3e12,
                "int8": 660.6e12,
            },
        ),
    )
}


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU model of that name.

    Raises:
        JobError: fakedist has no such model.
    """
    spec = GPUS.get(name.lower())
    if spec is None:
        close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.4)
        hint = f"did you mean --gpu {close[0]}? " if close else ""
        raise JobError(f"fakedist does not know the GPU {name!r}", f"{hint}it knows {', '.join(GPUS)}")
    return spec
