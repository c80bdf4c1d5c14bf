"""The examples are scripts as anybody writes them: they train under real torchrun, on CPUs too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
_ENDED_IN_GLOO = "terminate called without an active exception"
PRINTED = re.compile(r"step (\d+)  loss (\S+)  grad norm (\S+)")


def torchrun(*arguments: str) -> list[tuple[int, float, float]]:
    """Train with two real processes and gloo; gives what rank 0 printed of each step.

    A thread of gloo's that lets go of a tensor while the interpreter ends aborts the process, now and then; by then the
    rank has trained.
    """
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0 or _ENDED_IN_GLOO in finished.stderr, finished.stderr
    return [(int(step), float(loss), float(norm)) for step, loss, norm in PRINTED.findall(finished.stdout)]


@pytest.mark.parametrize(
    "options",
    [
        ["--tp", "2", "--checkpoint", "selective", "--loss-parallel"],
        ["--tp", "1", "--checkpoint", "full", "--optimizer", "foreach"],
        ["--tp", "1", "--dp-replicate", "2"],
    ],
    ids=["tensor-parallel", "fully-sharded", "hybrid-sharded"],
)
def test_llama_trains_under_torchrun(options: list[str]) -> None:
    sizes = ["--model", "debug", "--seq-len", "64", "--steps", "4", "--warmup-steps", "1", "--lr", "1e-2"]
    printed = torchrun(str(EXAMPLES / "llama_fsdp2.py"), *sizes, *options)
    assert [step for step, _, _ in printed] == [1, 2, 3, 4]
    # ln(2,048) = 7.62 is what a model that knows nothing says of 2,048 tokens.
    assert 7.4 < printed[0][1] < 8.2
    assert all(0 < norm < 100 for _, _, norm in printed)


def test_gpt_trains_under_torchrun() -> None:
    printed = torchrun(str(EXAMPLES / "ddp_gpt.py"), "--model", "debug", "--steps", "4", "--lr", "1e-3")
    assert [step for step, _, _ in printed] == [1, 2, 3, 4]
    # ln(512) = 6.24
    assert 6.0 < printed[0][1] < 6.5
    assert all(0 < norm < 100 for _, _, norm in printed)
