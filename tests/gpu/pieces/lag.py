"""Reserved memory of jobs whose streams keep blocks."""

from __future__ import annotations

from fakedist.extras.confirm.pieces import ROOT, Session, ended_with


def run(session: Session) -> bool:
    """Whether the real GPU reserves what it may."""
    ended = ended_with([str(ROOT / "bench" / "gpu_lag.py")], session.timeout_s(140.0))
    session.say(ended.output, *([f"gpu_lag.py {ended.why}"] if ended.why else []))
    return not ended.why
