from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fakedist.errors import JobError
from fakedist.gpu.models.catalogue import GPUS, find_gpu
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options import Door
from fakedist.options.making import JobProgram, make_jobs

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


def test_a_whole_file_stands_alone(tmp_path: Path) -> None:
    spec = read(tmp_path, WHOLE)
    assert dataclasses.replace(spec, name="h100-80g") == GPUS["h100-80g"]


def test_a_peak_replaces_only_its_own_type(tmp_path: Path) -> None:
    spec = read(tmp_path, 'like = "h100-80g"\n[peak_tflops]\nbf16 = 756')
    assert spec.peak_flops == {**GPUS["h100-80g"].peak_flops, "bf16": 756e12}


def test_the_power_of_the_command_line_goes_before_the_files(tmp_path: Path) -> None:
    (tmp_path / "my_gpu.toml").write_text(HBM2E)
    assert find_gpu(str(tmp_path / "my_gpu.toml"), 350).watts == 350


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


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        find_gpu(str(tmp_path / "none.toml"))


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00watts")
    with pytest.raises(JobError, match="is not TOML"):
        find_gpu(str(tmp_path / "bad.toml"))


def test_a_job_names_its_gpu_file_from_anywhere(tmp_path: Path) -> None:
    (job,) = make_jobs(JobProgram("a.py"), {"world_size": 1, "gpu": "my_gpu.toml"}, Door.TOML, str(tmp_path))
    assert job.gpu == str(tmp_path / "my_gpu.toml")
