"""``fakedist profile --device cuda``: the rank on a real GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakedist.launcher.machine import count_real_gpus
from tests.conftest import RunFakedist

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "integration" / "jobs"
CUDA = ("--device", "cuda", "--json")

pytestmark = pytest.mark.skipif(count_real_gpus() == 0, reason="no NVIDIA GPU was found on this machine")


@pytest.fixture(scope="module")
def peaks(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], list[int]]:
    """The summary of a small transformer's run, and what the script printed of the allocator's own statistics."""
    run = tmp_path_factory.mktemp("gpu") / "run"
    options = ("--world-size", "64", "--rank", "9", "--steps", "5", *CUDA, "-o", run)
    finished = run_fakedist("profile", *options, JOBS / "peaks.py")
    line = next(line for line in finished.stderr.splitlines() if line.startswith("STATS "))
    return finished.json(), json.loads(line.removeprefix("STATS "))


def test_the_peaks_are_the_allocators_own(peaks: tuple[dict[str, object], list[int]]) -> None:
    summary, counted = peaks
    assert (summary["peak_allocated_bytes"], summary["peak_reserved_bytes"]) == (counted[0], counted[1])
    assert summary["device"] == "cuda"


def test_doctor_says_that_cuda_works(run_fakedist: RunFakedist) -> None:
    assert "cuda" in run_fakedist("doctor", "--json").json()["devices"]


@pytest.mark.parametrize(
    "command",
    [
        (
            "--world-size",
            "1024",
            "--rank",
            "0",
            ROOT / "examples" / "llama_fsdp2.py",
            "--num-layers",
            "2",
            "--seq-len",
            "2048",
        ),
        ("--world-size", "16", "--rank", "3", ROOT / "examples" / "ddp_gpt.py"),
    ],
    ids=["llama_fsdp2", "ddp_gpt"],
)
def test_the_examples_run(command: tuple[str | Path, ...], run_fakedist: RunFakedist, tmp_path: Path) -> None:
    world, script = command[:4], command[4:]
    summary = run_fakedist("profile", *world, *CUDA, "-o", tmp_path / "run", *script).json()
    assert summary["peak_allocated_bytes"] > 0
    assert not [note for note in summary["notes"] if note["code"] == "peak_differs"]


def test_a_rank_that_does_not_fit_reports_it(run_fakedist: RunFakedist, tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    held = "[torch.empty(1 << 36, dtype=torch.uint8, device='cuda') for _ in range(9)]"
    script.write_text(f"import torch\nheld = {held}\n")
    finished = run_fakedist("profile", "--world-size", "8", "--rank", "0", *CUDA, "-o", tmp_path / "run", script)
    assert finished.code == 4
    assert not finished.json()["fits"]
