from __future__ import annotations

from pathlib import Path

import pytest

from fakedist.rundir.outcome import Outcome
from fakedist.sweep.plan import CommandLineSettings, sweep_of_file
from fakedist.sweep.point_rows import RankKind, RankResult
from fakedist.sweep.sweeping import next_rank


def ended(*ranks: int) -> dict[int, RankResult]:
    """How ranks of a pipeline of four ended: well. Rank 0 knows the pipeline."""
    found = {}
    for rank in ranks:
        pipeline = () if rank else (0, 2, 4, 6)
        found[rank] = RankResult(rank=rank, kind=RankKind.RAN, outcome=Outcome.STOPPED, pipeline=pipeline)
    return found


@pytest.mark.parametrize(
    ("every_stage", "ran", "later"),
    [(False, [0], 6), (False, [0, 6], None), (True, [0], 2), (True, [0, 6], 2), (True, [0, 2, 4], 6)],
)
def test_stages_run_in_the_order_of_the_pipeline(
    every_stage: bool, ran: list[int], later: int | None, tmp_path: Path
) -> None:
    (tmp_path / "sweep.toml").write_text('script = "train.py"\nworld_size = 8\n')
    plan = sweep_of_file(tmp_path / "sweep.toml", CommandLineSettings())
    assert next_rank(plan, ended(*ran), every_stage=every_stage) == later
