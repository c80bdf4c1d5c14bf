"""Dumps that torch's own Flight Recorder writes of a job that hangs, in processes of gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunFakedist, clean_environment

pytestmark = pytest.mark.long
JOB = Path(__file__).parent / "jobs" / "hanging.py"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("operation", "do not match: they differ in operation"),
        ("missing", "ranks 0,1 would wait forever"),
    ],
)
def test_a_hang_is_told_from_the_dumps_of_its_ranks(
    kind: str, said: str, tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = clean_environment() | {"TORCH_FR_BUFFER_SIZE": "100", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*launcher, str(JOB), kind, str(tmp_path)], env=environment, check=False, capture_output=True)
    pickles, jsons = sorted(tmp_path.glob("trace_*")), sorted(tmp_path.glob("json_*"))
    if not pickles:
        pytest.skip("this torch records no calls of gloo")
    for dumps in (pickles, jsons):
        finished = run_fakedist("match", *dumps, cwd=tmp_path)
        assert finished.code == 5
        assert said in finished.stdout.lower()
    assert "hanging.py:24 (<module>)" in run_fakedist("match", *pickles, cwd=tmp_path).stdout
