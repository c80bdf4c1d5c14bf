"""torch.compile makes the same of programs with and without fakedist: graphs, graph breaks, recompilations, warnings.

Nothing of ours may be seen by Dynamo, AOTAutograd, functorch or a higher-order operator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.conftest import RunFakedist
from tests.support.virtual import on_virtual_gpu

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "jobs" / "compiled_programs.py"
#: What was seen of each program.
Seen = dict[str, dict[str, Any]]


def _seen(text: str) -> Seen:
    lines = [line.split(" ", 2) for line in text.splitlines() if line.startswith("PROGRAM ")]
    return {name: json.loads(rest) for _, name, rest in lines}


def _attempts(seen: dict[str, Any]) -> int:
    """How many frames Dynamo tried to compile. Compiled autograd may compile some of torch's own Python, too,
    but none of what recording calls: that makes fewer.
    """
    counters = seen["counters"]
    counters.pop("unimplemented")
    frames: dict[str, int] = counters.pop("frames")
    return frames.get("total", 0)


def _caches(folder: Path) -> dict[str, str]:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    return {name: str(folder / name.lower()) for name in names}


def _bare(folder: Path) -> Seen:
    """The programs on the virtual GPU alone, with the group that torch has for tests of one process."""
    found = on_virtual_gpu(
        f"""
        import contextlib, io, os, runpy
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        sys.argv = [{str(JOB)!r}]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path({str(JOB)!r}, run_name="__main__")
        found["printed"] = printed.getvalue()
        """,
        **_caches(folder),
    )
    return _seen(found["printed"])


def _recorded(run_fakedist: RunFakedist, folder: Path) -> Seen:
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--until", "end", "-o", folder / "run")
    finished = run_fakedist("profile", *options, JOB, env=_caches(folder))
    assert finished.code == 0, finished.stderr
    return _seen(finished.stdout)


@pytest.mark.nightly
def test_torch_compiles_programs_as_it_does_without_fakedist(tmp_path: Path, run_fakedist: RunFakedist) -> None:
    bare = _bare(tmp_path / "bare")
    recorded = _recorded(run_fakedist, tmp_path / "recorded")
    assert len(bare) >= 50
    assert list(recorded) == list(bare)
    assert {name: seen["ended"] for name, seen in bare.items() if seen["ended"]} == {}
    attempts = {name: (_attempts(bare[name]), _attempts(recorded[name])) for name in bare}
    # Alone, compiled autograd tries 458 to 460 frames, as it happens.
    assert {name: both for name, both in attempts.items() if both[1] > 1.02 * both[0]} == {}
    different = {name: (bare[name], recorded[name]) for name in bare if recorded[name] != bare[name]}
    assert different == {}


@pytest.mark.parametrize("kind", ["AdamW", pytest.param("Descent", marks=pytest.mark.nightly)])
def test_compiled_steps_of_optimizers_are_recorded_as_steps(
    kind: str, tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    """By Dynamo's code for the frame, or by the graph into which Dynamo traced the step."""
    job, run = JOB.with_name("compiled_optimizers.py"), tmp_path / "run"
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--until", "end", "-o", run)
    finished = run_fakedist("profile", *options, job, kind, env=_caches(tmp_path))
    assert finished.code == 0, finished.stderr
    assert finished.stdout.count("WAY ") == 2
    assert "finished after 4 steps" in finished.stdout
    phases = pd.read_parquet(run / "tables" / "phases.parquet")
    assert "optimizer" in set(phases.loc[phases["step"] == 1, "phase"].astype(str))
