"""``--gpu-lag estimated``: a second run lags as the times of the first one's launches have it."""

from __future__ import annotations

from pathlib import Path

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "two_lags.py"
MIB = 1 << 20


def test_a_block_is_free_once_the_estimates_gpu_is_done_with_it(profile_once: ProfileOnce) -> None:
    ran = profile_once(JOB, options=("--json", "--gpu-lag=estimated", "--no-page"), world_size=1)
    events = ran.table("events")
    sizes = events["size_bytes"][events["action"] == "segment_alloc"].tolist()
    # Each phase needs one without lag, and five with full lag.
    assert sizes.count(200 * MIB) <= 2  # the GPU is done with a small product before the next but one is launched
    assert sizes.count(300 * MIB) == 5
    note = ran.note("streams_keep_estimated")
    assert note.startswith("record_stream keeps 10 blocks of 2.44 GiB a step at ")
    assert "jobs/two_lags.py:" in note
    assert ran.finished.stderr.count("the script runs again") == 1
