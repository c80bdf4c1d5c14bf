from __future__ import annotations

import dataclasses
import json

import pytest

from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import GPUS, find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Job
from fakedist.rundir.plain import from_plain, to_plain

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


@pytest.mark.parametrize(
    ("alias", "name"), [("h100", "h100-80g"), ("H100-SXM", "h100-80g"), ("a100", "a100-80g"), ("B200-sxm", "b200")]
)
def test_the_usual_model_has_shorter_names(alias: str, name: str) -> None:
    assert find_gpu(alias) is GPUS[name]


@pytest.mark.parametrize("name", ["voodoo2", "h100-80", "h20", ""])
def test_an_unknown_gpu_gets_the_list_without_a_guess(name: str) -> None:
    with pytest.raises(JobError) as caught:
        find_gpu(name)
    assert repr(name) in caught.value.message
    assert "did you mean" not in caught.value.hint
    assert all(known in caught.value.hint for known in GPUS)
    assert caught.value.exit_code == 2


def test_a_power_limit_replaces_the_models_own() -> None:
    limited = find_gpu("h100", 500)
    assert (limited.watts, GPUS["h100-80g"].watts) == (500, 700)
    assert dataclasses.replace(limited, watts=700) == GPUS["h100-80g"]


@every_gpu
def test_a_model_survives_a_run_directory(spec: GpuSpec) -> None:
    assert from_plain(GpuSpec, json.loads(json.dumps(to_plain(spec)))) == spec
