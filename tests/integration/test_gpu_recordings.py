"""Recordings on the virtual GPU: repeatable, not changed by fakedist's own recording, and those of a real GPU.

``make gpu`` compares every job; here are those that take a few seconds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fakedist.errors import FakedistError
from fakedist.extras.confirm.allocator_history import AllocatorRecording, JobRecord, compare_job, load
from fakedist.extras.confirm.jobs import JOBS
from fakedist.extras.confirm.pieces import DEFAULT_GPU, Way, like, record
from fakedist.gpu.driver.build import torch_build

pytestmark = pytest.mark.long

DATA = Path(__file__).parents[1] / "data" / "gpu"
#: The allocator alone, autocast and attention, a world, values that are read back, gradients that meet.
QUICK = ("allocations", "transformer_default", "fsdp2_8", "moe_dropless", "moe_capacity")


def recorded(job: str, *, profiled: bool = False, gpu: str = DEFAULT_GPU, memory_bytes: int | None = None) -> JobRecord:
    way = Way("virtual", profiled, gpu, memory_bytes)
    found = record([JOBS[job]], way, "pytest").jobs[job]
    assert not found.error, found.error
    return found


@cache
def bare(job: str) -> JobRecord:
    return recorded(job)


@pytest.mark.nightly
@pytest.mark.parametrize("job", QUICK)
def test_two_recordings_are_the_same(job: str) -> None:
    assert bare(job).events.actions.count("a") > 50
    found = compare_job(job, bare(job), recorded(job), ("first", "second"))
    assert found.is_same, "\n".join([found.reason, *found.lines])
    if job == "fsdp2_8":  # one stream's memory, and no casts of autocast's, which are kept by addresses of the host
        assert found.verdict == "same"


@pytest.mark.nightly
@pytest.mark.parametrize("job", QUICK)
def test_what_is_recorded_under_fakedist_is_what_happens_without_it(job: str) -> None:
    found = compare_job(job, bare(job), recorded(job, profiled=True), ("bare", "profiled"))
    assert found.is_same, "\n".join([found.reason, *found.lines])


#: Jobs that differ from an H200's, and why. Of the first three, peaks are the same.
SAME_PEAKS = ("allocations_max_split", "allocations_roundup", "transformer_fp32")
DIFFERENT = {
    "convnet": "cuDNN's workspaces",
    "convnet_channels_last": "cuDNN's workspaces",
    "lstm": "cuDNN's reserve space",
    "sizes_by_values": "scratch memory of operations whose sizes follow from values",
    "cuda_graphs": "which segments of a graph's pool are free when it is released",
}


def kept() -> list[tuple[str, Path]]:
    """Jobs of the recordings that are kept for the installed torch, each with its file."""
    try:
        version = torch_build()[0].partition("+")[0]
    except FakedistError:
        return []
    paths = sorted(DATA.glob(f"*-torch{version}/*-bare.jsonl.gz"))
    return [(job, path) for path in paths for job in load(path).jobs]


@pytest.mark.parametrize(("job", "path"), kept() or [("", Path())])
def test_the_virtual_gpu_does_what_the_real_one_did(job: str, path: Path) -> None:
    if not job:
        pytest.skip(
            "no recording of a real GPU with the installed torch is kept in tests/data/gpu; `make gpu` makes one"
        )
    real: AllocatorRecording = load(path)
    gpu, memory_bytes = like(real.head.gpu, real.head.capacity_bytes)
    found = compare_job(job, real.jobs[job], recorded(job, gpu=gpu, memory_bytes=memory_bytes))
    if job in SAME_PEAKS:
        assert found.peaks[:2] == found.peaks[2:]
    else:
        assert found.is_same == (job not in DIFFERENT), "\n".join([found.reason, *found.lines])
