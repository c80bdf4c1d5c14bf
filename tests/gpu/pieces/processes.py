"""Real processes that share the GPU, against each of their ranks faked on it and on the virtual one."""

from __future__ import annotations

from dataclasses import asdict

from fakedist.extras.confirm.pieces import Session
from tests.accuracy.many import JOBS, Way, compare_all

#: Ranks of each job; those of eight come last, as far as the time goes. A pipeline has four blocks to share.
_ORDER = tuple((job, ranks) for ranks in (2, 4, 8) for job in JOBS if ranks < 8 or job != "pipeline_1f1b")
#: In a rehearsal, which has fewer cores: one of every kind of traffic.
_REHEARSED = (("fsdp2", 2), ("pipeline_1f1b", 2), ("experts_dropless", 2))


def run(session: Session) -> bool:
    """Compare every job; whether each ran and differs only where the cause is known."""
    device = "virtual" if session.rehearsal else "cuda"
    ways = [Way(job, ranks, device, "nccl") for job, ranks in (_REHEARSED if session.rehearsal else _ORDER)]
    rows, failed = compare_all(ways, session.at_once, session.ends_at - 90.0, session.say)
    session.write("many-processes-cuda", [asdict(row) for row in rows], failed)
    return not failed and all(row.is_same or row.cause for row in rows)
