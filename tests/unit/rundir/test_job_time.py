"""The time of a job's step as the object of ``--json``."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fakedist.rundir.job_time import JobStep
from fakedist.rundir.notes import Note
from fakedist.rundir.plain import PlainValueError, from_plain, to_plain
from tests.unit.report.content.test_job import STEP


def test_a_step_survives_json_also_where_figures_are_not_known() -> None:
    for step in (STEP, replace(STEP, step_low_us=None, step_high_us=None, notes=[Note("note", "a text")])):
        assert from_plain(JobStep, json.loads(json.dumps(to_plain(step)))) == step


def test_a_stage_without_its_times_is_refused() -> None:
    plain = json.loads(json.dumps(to_plain(STEP)))
    del plain["stages"][1]["bubble_us"]
    with pytest.raises(PlainValueError, match="bubble_us is missing"):
        from_plain(JobStep, plain)
