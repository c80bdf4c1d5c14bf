"""One faked rank against the same rank among real processes: the same bytes, the same events of the allocator."""

from __future__ import annotations

import pytest

from tests.accuracy.many import Way, compare

pytestmark = pytest.mark.integration


@pytest.mark.nightly
@pytest.mark.parametrize(("job", "rank"), [("fsdp2", 1), ("pipeline_1f1b", 0)])
def test_a_faked_rank_allocates_what_a_rank_among_real_processes_does(job: str, rank: int) -> None:
    (row,) = compare(Way(job, 2, "virtual", "nccl"), [rank])
    assert row.real_allocated_bytes > 50 << 20
    assert (row.allocated_difference_bytes, row.reserved_difference_bytes, row.phases_differing) == (0, 0, 0)
    assert row.num_events > 1_000
    assert row.first_other_event == -1
