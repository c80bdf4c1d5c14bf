"""Too little memory, and memory that PyTorch does not see."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.gpu.growing import NUM_TRIALS
from tests.gpu.pieces.single import ScriptFailedError, run_script
from tests.gpu.record import ROOT
from tests.gpu.session import Session


def run_out_of_memory(session: Session) -> bool:
    """Shrink the memory by GiB on both sides; whether both ran."""
    failed: list[str] = []

    def trials_of(side: str) -> dict[tuple[str, int], Any]:
        try:
            found = run_script(session, session.real if side == "real" else session.virtual, "growing")
        except ScriptFailedError as error:
            failed.append(f"the {side} GPU: {error}")
            return {}
        if len(found) < NUM_TRIALS:
            failed.append(f"the {side} GPU: the time was over after {len(found)} of {NUM_TRIALS} trials")
        return {(row["limit"], row["gib"]): row["found"] for row in found}

    with ThreadPoolExecutor(2) as pool:  # one of them needs no GPU
        sides = dict(zip(("real", "virtual"), pool.map(trials_of, ("real", "virtual")), strict=True))
    trials = list(dict.fromkeys([*sides["real"], *sides["virtual"]]))
    rows = [
        {"limit": limit, "gib": gib, **{side: found.get((limit, gib)) for side, found in sides.items()}}
        for limit, gib in trials
    ]
    same = sum(row["real"] == row["virtual"] for row in rows)
    session.say(f"out of memory: {same} of {len(rows)} trials end at the same allocation")
    session.write("gpu-out-of-memory", rows, failed)
    return not failed


def run_lag(session: Session) -> bool:
    """Jobs with record_stream; whether the real GPU reserves what it may."""
    command = [sys.executable, os.fspath(ROOT / "bench" / "gpu_lag.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=session.timeout_s(200.0))
    except subprocess.TimeoutExpired as error:
        session.say(f"gpu_lag.py did not end in time: {error.stdout}")
        return False
    session.say(done.stdout, done.stderr)
    return not done.returncode


def run_outside(session: Session) -> bool:
    """The memory outside the allocator; whether every library could be used."""
    try:
        rows = run_script(session, session.real, "outside")
    except ScriptFailedError as error:
        session.write("gpu-outside", [], [str(error)])
        return False
    for row in rows:
        session.say(f"{row['after']:<48} {row['used_bytes'] - row['reserved_bytes']:>14,} bytes  {row['error']}")
    failed = [f"{row['after']}: {row['error']}" for row in rows if row["error"]]
    session.write("gpu-outside", [row for row in rows if not row["error"]], failed)
    return not failed
