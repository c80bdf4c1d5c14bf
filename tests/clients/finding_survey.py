"""``python -m tests.clients.finding_survey``: alarms of all rules in the catalogue's jobs, each with a judgement.

A judgement says of a job and a code whether the alarm is right, and why, by the job's source. It is made by hand, in
``finding_judgements.toml``, which has an empty code for a job without alarms. More than one alarm of twenty that is
wrong, or that has no judgement, is a failure. Alarms of jobs that were not judged yet are listed as new.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.catalogue import ENTRIES, Entry
from tests.clients.running import WrongRunError, run_rank

JUDGEMENTS = Path(__file__).parent / "finding_judgements.toml"
#: Alarms of which one may be wrong.
OF_HOW_MANY = 20


@dataclass(frozen=True)
class Alarm:
    """A finding of a job."""

    job: str
    code: str
    text: str
    line: str


@dataclass(frozen=True)
class Judgement:
    """Whether alarms of a code are right in a job, and what of the job's source shows it."""

    is_right: bool
    why: str


Judged = Mapping[tuple[str, str], Judgement]


def judgements(path: Path = JUDGEMENTS) -> Judged:
    """The judgements that are kept, by job and code."""
    kept: dict[tuple[str, str], Judgement] = {}
    for row in tomllib.loads(path.read_text())["alarm"]:
        key = row["job"], row["code"]
        if key in kept:
            raise ValueError(f"{path} judges {key} twice")
        kept[key] = Judgement(row["is_right"], row["why"])
    return kept


def alarms_of(job: str, report: Mapping[str, Any]) -> list[Alarm]:
    """The findings in a report's JSON."""
    return [Alarm(job, found["code"], found["text"], found["line"]) for found in report.get("findings", [])]


def survey(alarms: Sequence[Alarm], judged: Judged) -> tuple[list[str], bool]:
    """A line for each alarm with its judgement, and one for all; and whether few enough are wrong or not judged."""
    lines, num_right, num_new = [], 0, 0
    jobs = {job for job, _ in judged}
    for alarm in alarms:
        judgement = judged.get((alarm.job, alarm.code))
        word = "NOT JUDGED" if judgement is None else "right" if judgement.is_right else "WRONG"
        word = word if alarm.job in jobs else "NEW"
        num_right += word == "right"
        num_new += word == "NEW"
        why = "" if judgement is None else f" ({judgement.why})"
        lines.append(f"{word:10}  {alarm.code}  {alarm.job}: {alarm.text} {alarm.line}{why}")
    num_others = len(alarms) - num_right - num_new
    passes = num_others * OF_HOW_MANY <= num_right + num_others
    counts = f"{num_right} right, {num_others} wrong or not judged, {num_new} of jobs not judged yet"
    lines.append(f"{len(alarms)} ran: {counts}; one of {OF_HOW_MANY} may be")
    return lines, passes


def ran(entries: Sequence[Entry]) -> Iterator[Alarm]:
    """The alarms of the first rank of each entry that is installed."""
    for entry in entries:
        if entry.missing or entry.refused:
            continue
        with tempfile.TemporaryDirectory(prefix="fakedist-findings-") as directory:
            try:
                report = run_rank(entry, entry.ranks[0], Path(directory)).summary
            except WrongRunError as error:  # the clients' own part fails of it
                print(error, file=sys.stderr)
                continue
        found = alarms_of(entry.name, report)
        print(f"-- {entry.name}: {'; '.join(f'{alarm.code} {alarm.text}' for alarm in found) or 'nothing'}", flush=True)
        yield from found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the options choose; 1 if too many alarms are wrong or not judged."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.finding_survey", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="only jobs with TEXT in their name")
    parser.add_argument("--fast", action="store_true", help="only those that CI runs")
    options = parser.parse_args(arguments)
    chosen = [
        entry for entry in ENTRIES if options.only.lower() in entry.name.lower() and (entry.fast or not options.fast)
    ]
    lines, passes = survey(list(ran(chosen)), judgements())
    print("\n".join(lines))
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())
