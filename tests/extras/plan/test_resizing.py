"""Groups of a job of another size, and what cannot be told from its recording."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fakedist.errors import JobError
from fakedist.extras.plan.resizing import resize
from fakedist.results.opening import open_run
from fakedist.units import format_rank_list
from tests.unit.analysis.recorded import HandMade
from tests.unit.report.handmade import built, recorded


def made_of(groups: list[tuple[str, list[int]]], rank: int) -> HandMade:
    """A rank in groups of these labels, none of which it uses."""
    made = recorded()
    rows = [
        (number, str(number), label, tuple(ranks), 0, ranks.index(rank), "nccl")
        for number, (label, ranks) in enumerate(groups)
    ]
    made.record("groups", rows=rows)
    made.record("calls", rows=[])
    made.ended()
    return made


def resized(groups: list[tuple[str, list[int]]], number: int, world: int, rank: int, folder: Path) -> pd.DataFrame:
    run = open_run(built(made_of(groups, rank), folder / "run", world_size=world, rank=rank))
    other = resize(run, number).run
    assert other.manifest.job is not None
    assert other.manifest.job.world_size == number
    return other.table("groups").assign(rank=other.manifest.job.rank)


def test_stages_begin_later_where_each_has_more_data_parallel_ranks(tmp_path: Path) -> None:
    groups = [
        ("default_pg", [*range(16)]),
        ("tp", [8, 9]),
        ("dp", [8, 10, 12, 14]),
        ("pp", [0, 8]),
    ]
    found = resized(groups, 32, 16, 8, tmp_path)
    assert found["ranks"].tolist() == ["0-31", "16,17", "16-30:2", "0,16"]
    assert found["size"].tolist() == [32, 2, 8, 2]
    assert set(found["rank"]) == {16}


def test_replicas_grow_and_the_shards_between_them_stay(tmp_path: Path) -> None:
    groups = [("default_pg", [*range(16)]), ("dp_shard", [*range(8)]), ("dp_replicate", [0, 8])]
    found = resized(groups, 64, 16, 0, tmp_path)
    assert found["ranks"].tolist() == ["0-63", "0-7", format_rank_list(range(0, 64, 8))]


@pytest.mark.parametrize(
    ("groups", "number", "message"),
    [
        ([("default_pg", [*range(16)]), ("tp", [0, 1, 2, 3]), ("dp", [0, 4, 8, 12])], 18, "4 ranks of a group would"),
        ([("default_pg", [*range(16)]), ("mine", [0, 1, 2, 3])], 32, "another number of GPUs cannot be told"),
        ([("default_pg", [*range(16)]), ("dp", [0, 1, 5, 7]), ("tp", [0, 2])], 32, "cannot be told from rank 0"),
    ],
)
def test_what_the_groups_do_not_show_is_refused(
    groups: list[tuple[str, list[int]]], number: int, message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        resized(groups, number, 16, 0, tmp_path)
