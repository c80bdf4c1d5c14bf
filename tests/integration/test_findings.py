"""Each finding is found in a small job that has its fault, and not in the twin that has it mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "faults.py"
MIB = 1 << 20
#: Of some jobs, more options: memory in which requests fail at first, or of which replicas take a quarter.
_OPTIONS = {
    "FD116": ("--gpu-memory", "1GiB", "--reserve", "300MiB"),
    "FD304": ("--gpu-memory", "4GiB"),
}
_CODES = (
    *("FD101", "FD102", "FD103", "FD104", "FD105", "FD106", "FD107", "FD108", "FD109", "FD110", "FD111", "FD112"),
    *("FD113", "FD114", "FD115", "FD116", "FD117", "FD118"),
    *("FD201", "FD202", "FD203", "FD204", "FD205", "FD206", "FD207", "FD208", "FD304"),
)
#: Faults of one kind with another form in the same rule, by the form's name, which its sentence has.
_FORMS = {"casts": "FD117", "cpu": "FD208"}

pytestmark = [pytest.mark.integration, pytest.mark.long]


def findings(run_fakedist: RunFakedist, job: str, *more: str) -> dict[str, dict[str, Any]]:
    """The findings of a job by their codes; what only the host's speed decides is constant."""
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--gpu", "h100-sxm", "--host", "dgx-h100")
    options = (*place, *_OPTIONS.get(job, ()), "--no-page", "--json")
    report = run_fakedist("profile", *options, JOB, job, *more).json()
    assert not [note for note in report["notes"] if note["code"] == "estimate_failed"]
    return {finding["code"]: finding for finding in report["findings"]}


@pytest.mark.parametrize(("job", "code"), [*zip(_CODES, _CODES, strict=True), *_FORMS.items()])
def test_a_fault_is_found_and_its_twin_has_none(run_fakedist: RunFakedist, job: str, code: str) -> None:
    found = findings(run_fakedist, job)
    assert job == code or job in found[code]["text"].lower()
    assert code in found
    assert code not in findings(run_fakedist, job, "mended")


@pytest.mark.parametrize(("code", "more"), [("FD301", ""), ("FD301", "models"), ("FD302", ""), ("FD303", "")])
def test_a_fault_between_ranks_is_found_and_its_twin_has_none(
    run_fakedist: RunFakedist, tmp_path: Path, code: str, more: str
) -> None:
    for words in (more.split(), ["mended", *more.split()]):
        options = ("--world-size", "8", "--rank", "0,1", "--device", "virtual", "--host", "dgx-h100", "--no-page")
        where = tmp_path / f"runs{len(words)}"
        report = run_fakedist("profile", *options, "--json", "-o", where, JOB, code, *words)
        found = [finding["code"] for finding in json.loads(report.stdout)["findings"]]
        assert found == ([] if "mended" in words else [code])


def test_a_thing_is_said_once(run_fakedist: RunFakedist) -> None:
    """The dropouts of adapters are theirs, and not masks of activations; chunks of logits are not copies of them."""
    assert "FD117" not in findings(run_fakedist, "FD112")
    assert "FD102" not in findings(run_fakedist, "FD101")


@pytest.mark.parametrize(("code", "job"), [("FD202", "models"), ("FD304", "FD304 zero1")])
def test_no_alarm_for_ddps_second_step_or_zero1(run_fakedist: RunFakedist, code: str, job: str) -> None:
    assert code not in findings(run_fakedist, *job.split())


def test_what_mending_gives_is_what_the_mended_job_saves(run_fakedist: RunFakedist) -> None:
    """Whole gradients between micro-batches: 22.01 MiB where a shard of eight is an eighth."""
    found = findings(run_fakedist, "FD103")["FD103"]
    assert "whole gradients, 22.0" in found["text"]
    assert found["gives_high_bytes"] == pytest.approx(22.01 * MIB * 7 / 8, rel=0.01)
