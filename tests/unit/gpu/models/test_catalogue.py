from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import GPUS, find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Door, Job
from fakedist.options.making import JobProgram, make_jobs
from fakedist.rundir.plain import from_plain, to_plain

MODELS = Path(__file__).parents[4] / "fakedist" / "gpu" / "models"
WHOLE = (MODELS / "h100-80g.toml").read_text()
HBM2E = """
like = "h100-80g"
memory = "95.5GiB"   # what CUDA reports
memory_gb_s = 2400
watts = 500
"""


def read(directory: Path, text: str) -> GpuSpec:
    path = directory / "my_gpu.toml"
    path.write_text(text)
    return find_gpu(str(path))


def test_a_file_changes_what_it_gives_and_keeps_the_rest(tmp_path: Path) -> None:
    spec = read(tmp_path, HBM2E)
    assert (spec.name, spec.like) == ("my_gpu", "h100-80g")
    assert (spec.memory_bytes, spec.memory_bandwidth, spec.watts) == (int(95.5 * (1 << 30)), 2.4e12, 500)
    kept = ("product", "architecture", "sms", "clock_khz", "l2_bytes", "peak_flops", "host_bandwidth")
    assert [getattr(spec, name) for name in kept] == [getattr(GPUS["h100-80g"], name) for name in kept]


def test_the_memory_clock_follows_from_the_bandwidth(tmp_path: Path) -> None:
    spec = read(tmp_path, HBM2E)
    assert 2 * spec.memory_clock_khz * 1e3 * spec.memory_bus_bits / 8 == pytest.approx(2.4e12, rel=1e-6)
    same = read(tmp_path, 'like = "h100-80g"')
    assert same.memory_clock_khz == GPUS["h100-80g"].memory_clock_khz


def test_a_whole_file_stands_alone_and_a_peak_replaces_only_its_own_type(tmp_path: Path) -> None:
    assert dataclasses.replace(read(tmp_path, WHOLE), name="h100-80g") == GPUS["h100-80g"]
    spec = read(tmp_path, 'like = "h100-80g"\n[peak_tflops]\nbf16 = 756')
    assert spec.peak_flops == {**GPUS["h100-80g"].peak_flops, "bf16": 756e12}
    assert find_gpu(str(tmp_path / "my_gpu.toml"), 350).watts == 350  # the command line's power comes before the file's


@pytest.mark.parametrize("key", ["memory", "sms", "watts", "memory_gb_s", "product", "compute_capability", "l2"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    without = "\n".join(line for line in WHOLE.splitlines() if not line.startswith(f"{key} "))
    with pytest.raises(JobError, match=rf"my_gpu\.toml: {key} is missing"):
        read(tmp_path, without)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("watts = -5", "my_gpu.toml:3: watts is -5"),
        ("watts = nan", "my_gpu.toml:3: watts is nan"),
        ('watts = "500"', "my_gpu.toml:3: watts is '500', not a number"),
        ("watts = true", "my_gpu.toml:3: watts is True, not a number"),
        ("sms = 132.5", "my_gpu.toml:3: sms is 132.5, not a whole number"),
        ("sms = 0", "my_gpu.toml:3: sms is 0"),
        ("memory_gb_s = 2.4", "my_gpu.toml:3: memory_gb_s is 2.4"),
        ("memory = 80", "my_gpu.toml:3: memory is 80, not a size with a unit"),
        ('memory = "80"', "my_gpu.toml:3: memory cannot be read"),
        ('memory = "80MB"', "my_gpu.toml:3: memory is 80MB"),
        ('memory = "unlimited"', "my_gpu.toml:3: memory is unlimited"),
        ('compute_capability = "7.0"', "my_gpu.toml:3: compute_capability is '7.0'"),
        ('product = ""', "my_gpu.toml:3: product is ''"),
        ("power = 500", "my_gpu.toml:3: power is not a key"),
        ("peak_tflops = 989", "my_gpu.toml:3: peak_tflops is 989, not a table"),
        ("[peak_tflops]\nbf16 = 0", "my_gpu.toml:4: bf16 is 0"),
        ("[peak_tflops]\nfp16 = 989", "my_gpu.toml:4: fp16 is not a type"),
        ("watts = ", "line 3"),
    ],
)
def test_an_absurd_value_is_named_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        read(tmp_path, f'# mine\nlike = "h100-80g"\n{line}\n')
    assert said in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_a_file_like_an_unknown_gpu_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"my_gpu\.toml:1: like is 'h1000', not a known GPU") as caught:
        read(tmp_path, 'like = "h1000"')
    assert "h200" in caught.value.hint


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        find_gpu(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00watts")
    with pytest.raises(JobError, match="is not TOML"):
        find_gpu(str(tmp_path / "bad.toml"))


def test_a_job_names_its_gpu_file_from_anywhere(tmp_path: Path) -> None:
    (job,) = make_jobs(JobProgram("a.py"), {"world_size": 1, "gpu": "my_gpu.toml"}, Door.TOML, str(tmp_path))
    assert job.gpu == str(tmp_path / "my_gpu.toml")


# Nominal sizes in GB of the data sheets; what CUDA reports is less.
NOMINAL_GB = {"a100-40g": 40, "a100-80g": 80, "h100-80g": 80, "h200": 141, "b200": 192, "gb200": 192, "b300": 288}
NOMINAL_GB |= {"gb300": 288, "rtx-pro-6000": 96, "l40s": 48, "rtx4090": 24}
every_gpu = pytest.mark.parametrize("spec", GPUS.values(), ids=GPUS)


def test_every_promised_gpu_is_there() -> None:
    assert set(GPUS) == set(NOMINAL_GB)


@every_gpu
def test_a_models_facts_agree_with_its_data_sheet_and_each_other(spec: GpuSpec) -> None:
    assert 0.93 * NOMINAL_GB[spec.name] * 1e9 < spec.memory_bytes < NOMINAL_GB[spec.name] * (1 << 30)
    from_clock = 2 * spec.memory_clock_khz * 1e3 * spec.memory_bus_bits / 8
    assert spec.memory_bandwidth == pytest.approx(from_clock, rel=0.03)
    cores_per_sm = 64 if spec.compute_capability == (8, 0) else 128
    assert spec.peak_flops["fp32"] == pytest.approx(2 * cores_per_sm * spec.sms * spec.clock_khz * 1e3, rel=0.05)
    peaks = [spec.peak_flops[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8") if dtype in spec.peak_flops]
    assert peaks == sorted(peaks)
    assert ("fp8" in spec.peak_flops) == (spec.compute_capability >= (8, 9))
    assert from_plain(GpuSpec, json.loads(json.dumps(to_plain(spec)))) == spec


@every_gpu
def test_fields_for_the_driver_are_those_of_its_struct(spec: GpuSpec) -> None:
    from fakedist.gpu.virtual import _GpuModel

    others = {"name", "memory_bytes", "devices", "major", "minor", "runtime_version", "multicasts", "others_bytes"}
    assert set(spec.driver_fields()) | others == {field[0] for field in _GpuModel._fields_}
    assert all(0 < value < 1 << 31 for value in spec.driver_fields().values())


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        (Job(world_size=1, rank=0, target="a.py").gpu, "h100-80g"),
        ("H200", "h200"),
        *(("h100", "h100-80g"), ("H100-SXM", "h100-80g"), ("a100", "a100-80g"), ("B200-sxm", "b200")),
    ],
)
def test_a_model_is_known_in_any_case_and_the_usual_one_by_shorter_names(alias: str, name: str) -> None:
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
