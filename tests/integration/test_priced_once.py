"""A run's tables are computed once, and its step has one price on each GPU and fabric, whatever changes are tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakedist.cost_model import estimated
from fakedist.cost_model.kernels.kernel_times import KernelTimes
from fakedist.launcher import launching
from fakedist.options import Job
from fakedist.results import building
from fakedist.results.opening import open_run_directory

JOB = Path(__file__).parent / "jobs" / "timed.py"


def test_nothing_is_computed_or_priced_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[tuple[str, ...]]()

    def count(owner: object, name: str, key: Callable[..., tuple[str, ...]]) -> None:
        before = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> object:
            counts[name, *key(*args)] += 1
            return before(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(building, "compute_tables", lambda directory: ())
    count(KernelTimes, "price", lambda model, work, counts: (model.product,))
    count(estimated, "communication_of", lambda calls, groups, gpu, fabric: (gpu.name, repr(fabric)))
    job = Job(world_size=16, rank=0, target=str(JOB), gpu="h200", page=False)
    directory, _ = launching.profile(job, tmp_path / "run", False, launching.Streams())
    time = open_run_directory(directory).summary.time
    assert time is not None
    assert {gain.option for gain in time.gains} >= {"--gpu b200", "--what-if host=2x", "--what-if no-overlap"}
    assert ("compute_tables",) in counts
    assert {name for kind, name in (each for each in counts if each[0] == "price")} >= {"NVIDIA H200", "NVIDIA B200"}
    assert set(counts.values()) == {1}, counts
