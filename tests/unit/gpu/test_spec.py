"""The GPU models: figures that fit each other, and names."""

from __future__ import annotations

import pytest

from fakedist.errors import JobError
from fakedist.gpu.spec import GPUS, GpuSpec, find_gpu
from fakedist.job import Job

# Nominal sizes in GB of the data sheets; what CUDA reports is less.
NOMINAL_GB = {
    "a100-40g": 40,
    "a100-80g": 80,
    "h100-80g": 80,
    "h200": 141,
    "b200": 192,
    "gb200": 192,
    "b300": 288,
    "gb300": 288,
    "rtx-pro-6000": 96,
    "l40s": 48,
    "rtx4090": 24,
}
every_gpu = pytest.mark.parametrize("spec", GPUS.values(), ids=GPUS)


def test_every_promised_gpu_is_there() -> None:
    assert set(GPUS) == set(NOMINAL_GB)


@every_gpu
def test_memory_is_a_little_less_than_on_the_box(spec: GpuSpec) -> None:
    assert 0.93 * NOMINAL_GB[spec.name] * 1e9 < spec.memory_bytes < NOMINAL_GB[spec.name] * (1 << 30)


@every_gpu
def test_bandwidth_is_clock_times_bus(spec: GpuSpec) -> None:
    from_clock = 2 * spec.memory_clock_khz * 1e3 * spec.memory_bus_bits / 8
    assert spec.memory_bandwidth == pytest.approx(from_clock, rel=0.03)


@every_gpu
def test_fp32_peak_is_clock_times_cores(spec: GpuSpec) -> None:
    cores_per_sm = 64 if spec.compute_capability == (8, 0) else 128
    assert spec.peak_flops["fp32"] == pytest.approx(2 * cores_per_sm * spec.sms * spec.clock_khz * 1e3, rel=0.05)


@every_gpu
def test_narrower_types_are_no_slower(spec: GpuSpec) -> None:
    peaks = [spec.peak_flops[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in spec.peak_flops]
    assert peaks == sorted(peaks)
    assert ("fp8" in spec.peak_flops) == (spec.compute_capability >= (8, 9))


@every_gpu
def test_fields_for_the_driver_are_those_of_its_struct(spec: GpuSpec) -> None:
    from fakedist.gpu.virtual import _GpuModel

    told = set(spec.driver_fields()) | {"name", "memory_bytes", "devices", "major", "minor", "runtime_version"}
    assert told == {field[0] for field in _GpuModel._fields_}
    assert all(0 < value < 1 << 31 for value in spec.driver_fields().values())


def test_the_default_gpu_of_a_job_is_known() -> None:
    assert find_gpu(Job(world_size=1, rank=0, target="a.py", device="virtual").gpu).name == "h100-80g"


def test_names_do_not_mind_case() -> None:
    assert find_gpu("H200") is GPUS["h200"]


def test_a_misspelt_gpu_gets_a_suggestion() -> None:
    with pytest.raises(JobError) as caught:
        find_gpu("h100-80gb")
    assert "h100-80gb" in caught.value.message
    assert "did you mean --gpu h100-80g?" in caught.value.hint
    assert caught.value.exit_code == 2


def test_an_unknown_gpu_gets_the_list() -> None:
    with pytest.raises(JobError) as caught:
        find_gpu("voodoo2")
    assert "did you mean" not in caught.value.hint
    assert all(name in caught.value.hint for name in GPUS)
