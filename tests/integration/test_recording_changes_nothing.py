"""Recording, computing small values and faking the world must not change what the allocator does, not by one block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist
from tests.support.virtual import on_virtual_gpu

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "jobs" / "peaks.py"


@pytest.fixture(scope="module")
def bare() -> Any:
    """The allocator's statistics of the job on the virtual GPU alone: it draws no values, so it asks for none."""
    found = on_virtual_gpu(
        f"""
        import contextlib, io, runpy
        text = open({str(JOB)!r}).read().replace("assert not torch.isnan(loss)", "torch.isnan(loss)")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(text, "peaks.py", "exec"), {{"__name__": "__main__"}})
        found["stats"] = json.loads(printed.getvalue().removeprefix("STATS "))
        """
    )
    return found["stats"]


@pytest.mark.parametrize("values", ["small", "off"])
def test_the_allocator_does_the_same_with_and_without_fakedist(
    bare: Any, values: str, tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    text = JOB.read_text()
    if values == "off":
        text = text.replace("assert not torch.isnan(loss)", "torch.isnan(loss)")
    (tmp_path / "job.py").write_text(text)
    options = ("--world-size", "1024", "--rank", "8", "--device", "virtual", "--values", values, "--steps", "5")
    finished = run_fakedist("profile", *options, "-o", tmp_path / "run", tmp_path / "job.py")
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("STATS "))
    assert json.loads(line.removeprefix("STATS ")) == bare
