"""Times of kernels of a few shapes on this GPU, as a calibration table. `make calibrate` alone measures many."""

from __future__ import annotations

from fakedist.extras.confirm.pieces import Session, ended_with


def run(session: Session) -> bool:
    """Measure them into the folder of results; whether that worked."""
    path = (session.others / "own.times.json").resolve()
    rehearse = ["--rehearse"] if session.rehearsal else []
    ended = ended_with(["-m", "tests.gpu.calibrate", "--out", str(path), "--short", *rehearse], session.timeout_s())
    session.say(*ended.output.strip().splitlines()[-5:], *([f"calibrate {ended.why}"] if ended.why else []))
    if not ended.why and not session.rehearsal:
        session.say(f"{path}: what `make calibrate` writes; fakedist profile --times uses it")
    return not ended.why
