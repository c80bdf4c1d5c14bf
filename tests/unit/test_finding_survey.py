"""The survey of findings: alarms are counted by their judgements."""

from __future__ import annotations

import pytest

from fakedist.findings import finding_all  # noqa: F401 - registers the rules
from fakedist.findings.registry import RULES
from tests.clients.catalogue import ENTRIES
from tests.clients.finding_survey import Alarm, Judgement, alarms_of, judgements, survey

RIGHT, WRONG = Judgement(True, "it is so"), Judgement(False, "it is not")


def test_every_judgement_is_of_a_job_and_a_rule_that_exist_and_gives_a_reason() -> None:
    names = {entry.name for entry in ENTRIES}
    for (job, code), judgement in judgements().items():
        assert job in names
        assert not code or code in RULES
        assert judgement.why


@pytest.mark.parametrize(("num_right", "other", "passes"), [(19, WRONG, True), (18, WRONG, False), (18, None, False)])
def test_one_of_twenty_alarms_may_be_wrong_or_not_judged(num_right: int, other: Judgement | None, passes: bool) -> None:
    alarms = [Alarm(str(number), "FD101", "text", "") for number in range(num_right + 1)]
    judged = {(str(number), ""): RIGHT for number in range(num_right + 1)}
    judged |= {(str(number), "FD101"): RIGHT for number in range(num_right)}
    if other is not None:
        judged[str(num_right), "FD101"] = other
    lines, passed = survey(alarms, judged)
    assert passed == passes
    assert lines[-2].startswith("NOT JUDGED" if other is None else "WRONG")
    assert f"{num_right + 1} ran: {num_right} right, 1 wrong or not judged" in lines[-1]


def test_no_alarm_is_no_failure_nor_one_of_a_job_that_is_new() -> None:
    assert survey([], {})[1]
    assert survey([Alarm("new", "FD101", "text", "")], {("old", ""): RIGHT})[1]


def test_alarms_are_the_findings_of_a_report() -> None:
    report = {"findings": [{"code": "FD203", "text": "waits", "line": "a.py:1 (f)", "share": 0.5}]}
    assert alarms_of("a job", report) == [Alarm("a job", "FD203", "waits", "a.py:1 (f)")]
    assert alarms_of("a job", {}) == []
