"""Adds inference engines to the summary of a run."""

from __future__ import annotations

import dataclasses

import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.extras.rl.engine_memory import engine_advice, engine_memory, engine_sleeps
from fakedist.rundir.summary import Summary


def summarize(summary: Summary, recording: Recording, tables: dict[str, pd.DataFrame]) -> Summary:
    """Add vLLM's engine, if there was one, how engines slept, and advice."""
    engine = engine_memory(recording, summary.exit, summary.estimated_outside)
    advice = [*summary.advice, *engine_advice(recording, engine, tables)]
    return dataclasses.replace(summary, engine=engine, engine_sleeps=engine_sleeps(recording), advice=advice)
