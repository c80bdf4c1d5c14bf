"""From a profiled run and a trace of its job to a calibration table, and back into an estimate.

The trace is what torch.profiler writes on the virtual GPU, with the names and durations of a GPU put in.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.cost_model.kernels.calibration_table import read_calibration_table
from fakedist.errors import SetupError
from tests.conftest import RunFakedist
from tests.gpu import calibrate

pytestmark = pytest.mark.long
_SCRIPT = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(2048, 1024, device="cuda")
activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
ready = lambda profiler: profiler.export_chrome_trace("trace.json")
with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=2), on_trace_ready=ready) as profiler:
    for _ in range(4):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
"""
_JOB = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--steps", "4", "--json")
PRODUCT_US, OTHER_US = 131.5, 7.25


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, run_fakedist: RunFakedist) -> Path:
    """A run, the virtual GPU's trace of it, and one as of a GPU."""
    directory = tmp_path_factory.mktemp("calibrate")
    (directory / "train.py").write_text(_SCRIPT)
    run_fakedist("profile", *_JOB, "-o", directory / "run", "train.py", cwd=directory).json()
    (directory / "gpu.json.gz").write_bytes(gzip.compress(json.dumps(as_of_a_gpu(directory / "trace.json")).encode()))
    return directory


def as_of_a_gpu(trace: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(trace.read_text())
    for event in found["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            is_product = event["name"].startswith("cublas")
            event["dur"] = PRODUCT_US if is_product else OTHER_US
            if is_product:
                event["name"], event["args"]["grid"] = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", [132, 1, 1]
    return found


def test_a_trace_of_the_job_replaces_estimates_by_its_times(directory: Path, run_fakedist: RunFakedist) -> None:
    told = run_fakedist("calibrate", "run", "--from-trace", "gpu.json.gz", cwd=directory)
    assert told.code == 0
    first, *_, last = told.stdout.splitlines()
    assert first.startswith("24 of the step's 24 launches were measured, by 48 of 48 kernels in gpu.json.gz (2 steps")
    assert last == "fakedist time run --times run.times.json"
    table = json.loads((directory / "run.times.json").read_text())
    times = {row["time_us"] for row in table["rows"] if row["work"]["kind"] == "product"}
    assert times == {PRODUCT_US}
    assert {row["time_us"] for row in table["rows"]} == {PRODUCT_US, OTHER_US}

    options = (*_JOB, "--times", "run.times.json", "-o", directory / "again")
    again = run_fakedist("profile", *options, "train.py", cwd=directory).json()
    assert any(note["text"].startswith("measured on your NVIDIA H100") for note in again["kernels"]["notes"])
    assert again["time"]["kernel_us"] == pytest.approx(8 * PRODUCT_US + 16 * OTHER_US)
    assert again["kernels"]["calibrated_on"]["gpu"] == "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("NVIDIA H200", "fakedist time run --gpu h200 --times h.json"),
        ("NVIDIA H900", 'a GPU file with product = "NVIDIA H900" makes the table usable'),
    ],
)
def test_a_table_is_of_the_gpu_that_the_trace_names(
    directory: Path, run_fakedist: RunFakedist, gpu: str, said: str
) -> None:
    found = as_of_a_gpu(directory / "trace.json")
    for device in found["deviceProperties"]:
        device["name"] = gpu
    (directory / "other.json").write_text(json.dumps(found))
    told = run_fakedist("calibrate", "run", "--from-trace", "other.json", "-o", "h.json", "--force", cwd=directory)
    assert told.code == 0
    assert said in told.stdout
    assert json.loads((directory / "h.json").read_text())["origin"]["gpu"] == gpu


def test_the_virtual_gpus_own_trace_is_refused(directory: Path, run_fakedist: RunFakedist) -> None:
    told = run_fakedist("calibrate", "run", "--from-trace", "trace.json", "-o", "none.times", cwd=directory)
    assert told.code == 1
    assert "trace of the virtual GPU, where each kernel takes 1 us" in told.stderr
    assert not (directory / "none.times").exists()


def test_what_cannot_be_used_is_told_in_one_line(directory: Path, run_fakedist: RunFakedist) -> None:
    (directory / "cut.json").write_bytes((directory / "trace.json").read_bytes()[:30_000])
    for arguments, said in (
        (("calibrate", "run", "--from-trace", "none.json", "-o", "o"), "none.json does not exist"),
        (("calibrate", "run", "--from-trace", "cut.json", "-o", "o"), "cut.json is damaged or cut off after"),
        (("calibrate", "none", "--from-trace", "gpu.json.gz", "-o", "o"), "none"),
        (("profile", *_JOB, "--times", "train.py", "train.py"), "train.py is not a table of measured times"),
    ):
        told = run_fakedist(*arguments, cwd=directory)
        assert told.code == 1
        assert said in told.stderr
        assert len(told.stderr.splitlines()) <= 2


@pytest.mark.nightly
def test_a_rehearsal_of_make_calibrate_writes_a_table_that_cannot_be_used(tmp_path: Path) -> None:
    out = tmp_path / "rehearsed.json"
    assert calibrate.main(["--rehearse", "--short", "--out", str(out)]) == 0
    table = json.loads(out.read_text())
    assert table["origin"]["rehearsal"] is True
    assert {row["work"]["family"] for row in table["rows"]} >= {"gemm", "attention", "norm", "elementwise", "copy"}
    assert {row["work"].get("layout") for row in table["rows"] if row["work"]["kind"] == "product"} >= {
        "TN",
        "NN",
        "NT",
    }
    with pytest.raises(SetupError, match="comes from a rehearsal"):
        read_calibration_table(out)
