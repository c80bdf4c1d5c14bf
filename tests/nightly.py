"""Runs what takes too long for CI, one part after the other, and prints at the end which passed and which failed.

``make nightly`` names the versions of torch and Python. ``make nightly ONLY=torch`` runs the parts with "torch" in
their names.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

#: What pytest's summary (``tests/summary.py``) and the mutants print of what ran.
_RAN = re.compile(r"^[\d,]+ ran: .*|^\d+ of \d+ .*noticed.*", re.MULTILINE)
#: Cases of each kind of file, where the tests of CI have 30.
_FUZZ_CASES = 2_000


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: What it is called in the summary, and chosen by.
        command: Its words.
        environment: Variables that it gets besides.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """A part that has run.

    Attributes:
        name: The part's.
        code: Its exit code; negative for a signal.
        seconds: How long it took.
        ran: Its own lines on what ran.
    """

    name: str
    code: int
    seconds: float
    ran: Sequence[str] = ()


def parts(torches: Sequence[str], pythons: Sequence[str]) -> list[Part]:
    """All parts, those first that find the most."""
    pytest = (sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    # Memory that no computed value reached reads as a pattern, so a report that depends on it changes.
    poisoned = {"FAKEDIST_POISON": "1"}
    return [
        *(Part(f"torch {torch}", ("make", "torch", f"TORCH={torch}")) for torch in torches),
        Part("poisoned unit", (*pytest, "tests/unit"), poisoned),
        Part("poisoned integration", (*pytest, "tests/integration", "tests/extras"), poisoned),
        Part("poisoned clients", ("make", "clients-fast"), poisoned),
        *(Part(f"python {version}", ("make", "python", f"VERSION={version}")) for version in pythons),
        Part("whole runs", (*pytest, "-m", "nightly", "tests/extras", "tests/integration", "tests/page", "tests/unit")),
        Part(
            "cold starts", (*pytest, "-m", "integration", "tests/extras", "tests/integration"), {"FAKEDIST_COLD": "1"}
        ),
        Part("clients", ("make", "clients-fast")),
        Part("recipes", ("make", "clients-recipes")),
        # Most jobs end before the steps in which the host is timed.
        Part("longer jobs", ("make", "clients-longer")),
        # All rules over all jobs for as long, so that those of time see the timed step.
        Part("findings", ("make", "clients-findings")),
        Part("hostile files", (*pytest, "tests/hostile"), {"FAKEDIST_FUZZ": str(_FUZZ_CASES)}),
        Part(
            "random schedules",
            (*pytest, "tests/unit/analysis/test_random_calls.py"),
            {"FAKEDIST_FUZZ": str(_FUZZ_CASES)},
        ),
        # In one process, as each of these tests needs the machine for itself.
        Part("load", (sys.executable, "-m", "pytest", "-rP", "tests/load"), {"FAKEDIST_LOAD": "1"}),
        Part("mutants", ("make", "mutants", f"ARGS=--seed {time.strftime('%j')}")),
        Part("benchmarks", ("make", "bench")),
        Part("pace", ("make", "bench-pace")),
    ]


def run(part: Part) -> Result:
    """Run a part. What it prints is passed on."""
    print(f"== {part.name}: {' '.join(part.command)}", flush=True)
    began, lines = time.monotonic(), []
    with subprocess.Popen(
        part.command,
        env=os.environ | part.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    ran = [match.strip() for match in _RAN.findall("".join(lines))]
    return Result(part.name, process.returncode, time.monotonic() - began, ran)


def summary(results: Sequence[Result]) -> list[str]:
    """Lines: how many parts passed, then each with what it ran."""
    failed = [result for result in results if result.code]
    lines = [f"{len(results)} parts ran: {len(results) - len(failed)} passed, {len(failed)} failed"]
    for result in results:
        ended = "passed" if not result.code else f"FAILED (exit {result.code})"
        lines.append(f"  {result.name:18}  {result.seconds / 60:5.0f} min  {ended}")
        lines += [f"      {line}" for line in result.ran]
    if failed:
        lines.append(f"failed: {', '.join(result.name for result in failed)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parser.add_argument("--torches", default="", help="releases of torch, separated by spaces")
    parser.add_argument("--pythons", default="", help="versions of Python, separated by spaces")
    parser.add_argument("--only", default="", help="parts with this in their names")
    chosen = parser.parse_args(arguments)
    wanted = [part for part in parts(chosen.torches.split(), chosen.pythons.split()) if chosen.only in part.name]
    results = [run(part) for part in wanted]
    print("== what ran")
    print("\n".join(summary(results)))
    return int(not results or any(result.code for result in results))


if __name__ == "__main__":
    sys.exit(main())
