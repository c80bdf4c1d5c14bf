"""The reports of played loads and of played steps, as the terminal, Markdown, JSON and CSV have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from syrupy.assertion import SnapshotAssertion

from fakedist.analysis.routed_blocks import Counts
from fakedist.cli.output import CSV
from fakedist.extras.play.long_runs import FailedRequest, PlayedSetting, PlayedSteps
from fakedist.extras.play.play_report import long_run_report, play_report, ranks_report
from fakedist.extras.play.router_draws import Draw, Playable, Played, PlayedChange, PlayedSize
from fakedist.router_load import RouterPass
from fakedist.units import GIB, MIB
from tests.unit.report.test_faces import FORMATS, faces

_NONE = np.zeros((0, 0), np.int64)


def playable(**more: Any) -> Playable:
    """A recording of two layers with 8 experts on 4 ranks, as far as its report reads it."""
    passes = [RouterPass(layer, 0, 0, 64, 8, 2) for layer in range(2)]
    program = SimpleNamespace(
        base=np.array([5 * MIB, MIB, 3 * MIB]),
        follows=np.array([-1, 0, 1]),
        bounded=np.array([0]),
        largest_bounded_bytes=5 * MIB,
    )
    settings: dict[str, Any] = {
        "run": SimpleNamespace(path=Path("/runs/moe")),
        "job": SimpleNamespace(rank=1, world_size=8),
        "counts": Counts(passes, (0, 1, 2, 3)),
        "groups": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "room_bytes": 70 * GIB,
        "program": program,
        **more,
    }
    return cast(Playable, SimpleNamespace(**settings))


def played(*, has_steps: bool = True) -> Played:
    """Four draws of a load, of which one has too little memory."""
    draws = pd.DataFrame(
        {
            "seed": range(4),
            "rank": [1, 2, 1, 6],
            "share": [1.5, 1.25, 2.0, 1.75],
            "busiest": [1.6, 1.3, 2.1, 1.8],
            "peak_allocated_bytes": [60 * GIB, 55 * GIB, 72 * GIB, 65 * GIB],
            "peak_reserved_bytes": [62 * GIB, 58 * GIB, 74 * GIB, 68 * GIB],
            "fits": [True, True, False, True],
            "step_us": [9e5, 8e5, 1e6, 9.5e5] if has_steps else np.nan,
            "step_low_us": [8e5, 7e5, 9e5, 8.5e5] if has_steps else np.nan,
            "step_high_us": [1e6, 9e5, 1.1e6, 1.05e6] if has_steps else np.nan,
        }
    )
    worst = [Draw(seed, rank, share, share, _NONE, 1.0, _NONE) for seed, rank, share in ((2, 1, 2.0), (3, 6, 1.75))]
    remedies = [
        PlayedChange("--recompute", [50 * GIB, 48 * GIB], 0),
        PlayedChange("capacity factor 1.25", [66 * GIB, 60 * GIB], 1, 0.125),
    ]
    sizes = [PlayedSize(2, 1.2, 50 * GIB), PlayedSize(4, 1.5, 60 * GIB)]
    even_us = 7.5e5 if has_steps else float("nan")
    return Played(playable(), "lognormal:1", draws, 40 * GIB, even_us, worst, remedies, sizes)


def rank_draws(*, has_steps: bool = True) -> pd.DataFrame:
    """One draw on each of three ranks."""
    return pd.DataFrame(
        {
            "seed": [5] * 3,
            "rank": [0, 1, 2],
            "share": [0.5, 1.5, 1.0],
            "tokens": [1024, 3072, 2048],
            "peak_allocated_bytes": [30 * GIB, 75 * GIB, 40 * GIB],
            "peak_reserved_bytes": [32 * GIB, 76 * GIB, 42 * GIB],
            "fits": [True, False, True],
            "step_us": 9e5 if has_steps else np.nan,
            "step_low_us": 8e5 if has_steps else np.nan,
            "step_high_us": 1e6 if has_steps else np.nan,
        }
    )


def played_steps(*, fails: bool = True) -> PlayedSteps:
    """Forty steps of two names with two seeds, of which the second runs out of memory."""
    lengths = [1024, 4096, 2048, 1024]
    kinds = SimpleNamespace(
        steps=[
            SimpleNamespace(number=n + 2, name="evaluation" if n == 3 else "train", length=length)
            for n, length in enumerate(lengths)
        ],
        left_out=[1],
        sequence=["train", "train", "train", "evaluation", "saving"],
        fitted_part=lambda: 0.975,
    )
    names = ["evaluation" if step % 4 == 0 else "train" for step in range(1, 41)]
    rows = [
        (seed, step, names[step - 1], 1024 + 120 * step, (10 + step + seed) * GIB, (12 + step + seed) * GIB, 3 * step)
        for seed in (0, 1)
        for step in range(1, 41 if seed == 0 or not fails else 32)
    ]
    columns = ["seed", "step", "name", "length", "peak_allocated_bytes", "peak_reserved_bytes", "num_mallocs"]
    failure = FailedRequest(1, 32, "evaluation", 4864, "aten.addmm", "/job/train.py:7 (main)", GIB, 42 * GIB, 44 * GIB)
    settings = [
        PlayedSetting("as recorded", 2, [32] if fails else [], 52 * GIB, 3.0),
        PlayedSetting("expandable_segments:True", 2, [], 48 * GIB, 0.25),
    ]
    run = SimpleNamespace(path=Path("/runs/long"), manifest=SimpleNamespace(cwd="/job"))
    playable = cast(Any, SimpleNamespace(run=run, kinds=kinds, room_bytes=70 * GIB))
    frame = pd.DataFrame(rows, columns=columns)
    return PlayedSteps(playable, "lognormal:1", names, frame, settings, failure if fails else None)


@pytest.fixture(autouse=True)
def _at_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_played_loads(snapshot: SnapshotAssertion) -> None:
    for has_steps in (True, False):
        for form, text in faces(play_report(played(has_steps=has_steps)), *FORMATS, CSV):
            assert text == snapshot(name=f"{has_steps}-{form}")


def test_a_load_played_on_each_rank(snapshot: SnapshotAssertion) -> None:
    report = ranks_report(playable(), "lognormal:1", rank_draws())
    for form, text in faces(report, *FORMATS, CSV):
        assert text == snapshot(name=form)


def test_played_steps(snapshot: SnapshotAssertion) -> None:
    for fails in (True, False):
        for form, text in faces(long_run_report(played_steps(fails=fails)), *FORMATS, CSV):
            assert text == snapshot(name=f"{fails}-{form}")
