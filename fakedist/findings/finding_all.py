"""Finds what is wrong with a run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from fakedist.bounded import UnreadableError, read_bytes
from fakedist.findings import distribution_rules, loss_rules, memory_rules, time_rules
from fakedist.findings.case import Case
from fakedist.findings.registry import RULES, Fault, FaultRule
from fakedist.rundir.finding import Finding

_LINE = re.compile(r"(?P<file>.*):(?P<number>\d+) \(.*\)")
_COMMENT = re.compile(r"#\s*fakedist:\s*ignore\b(?:\s*\[(?P<codes>[^\]]*))?", re.IGNORECASE)
_MOST_BYTES = 8 << 20


def path_of(line: str) -> str:
    """The file of a line of the script, ``file:line (function)``; empty if there is none."""
    match = _LINE.fullmatch(line)
    return match["file"] if match else ""


def is_ignored(finding: Finding) -> bool:
    """Whether a comment at the finding's line ignores it, or at the first or last line of its statement.

    A file that cannot be read has no comments.
    """
    match = _LINE.fullmatch(finding.line)
    if match is None:
        return False
    try:
        text = read_bytes(Path(match["file"]), _MOST_BYTES).decode(errors="replace")
    except (OSError, UnreadableError):
        return False
    lines = text.splitlines()
    number = int(match["number"])
    return any(
        _names(comment["codes"], finding.code)
        for line in {number, *(_statement(text, number) if _COMMENT.search(text) else ())}
        if 0 < line <= len(lines) and (comment := _COMMENT.search(lines[line - 1]))
    )


def _names(codes: str | None, code: str) -> bool:
    named = re.findall(r"\w+", (codes or "").upper())
    return not named or "ALL" in named or any(map(code.startswith, named))


def _statement(text: str, number: int) -> tuple[int, ...]:
    """The first and last line of the statement at a line, or of its head if it has a body; empty if there is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    heads = []
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = (node.end_lineno or node.lineno) if not body else max(body[0].lineno - 1, node.lineno)
            if node.lineno <= number <= last:
                heads.append((node.lineno, last))
    return max(heads, default=())


#: The modules that register the rules.
_MODULES = (loss_rules, memory_rules, time_rules, distribution_rules)


#: Runs a rule of a code, and returns what it saw; nothing if it failed.
Tried: TypeAlias = Callable[[str, Callable[[], list[Fault]]], list[Fault]]


def find_faults(case: Case, tried: Tried) -> list[Finding]:
    """The findings of a run, certain ones first, then by what they give or take.

    Args:
        case: The run. A rule whose tables it lacks says nothing.
        tried: Runs its rules.
    """
    findings = [
        _finding(case, rule, fault)
        for rule in RULES.values()
        if not rule.of_job and all(map(case.has, rule.needs))
        for fault in tried(rule.code, partial(_all, rule, case))
    ]
    return sorted(findings, key=lambda finding: (not finding.is_certain, -finding.share, finding.code))


def find_job_faults(cases: Mapping[int, Case], tried: Tried) -> list[Finding]:
    """The findings of several ranks of a job, by the ranks' numbers."""
    first = next(iter(cases.values()))
    return [
        _finding(first, rule, fault)
        for rule in RULES.values()
        if rule.of_job and all(case.has(name) for case in cases.values() for name in rule.needs)
        for fault in tried(rule.code, partial(_all, rule, cases))
    ]


def _all(rule: FaultRule, of: Case | Mapping[int, Case]) -> list[Fault]:
    return list(rule.find(of))  # type: ignore[arg-type]


def _finding(case: Case, rule: FaultRule, fault: Fault) -> Finding:
    low_bytes, high_bytes = fault.gives_bytes or (None, None)
    low_us, high_us = fault.gives_us or (None, None)
    advised = {advice.rule for advice in case.summary.advice}
    advised |= {gain.option for gain in case.time.gains} if case.time else set()
    of_peak = max(high_bytes or 0, fault.costs_bytes) / max(case.summary.peak_reserved_bytes, 1)
    of_step = max(high_us or 0.0, fault.costs_us) / case.time.step_us if case.time and case.time.step_us else 0.0
    return Finding(
        rule.code,
        rule.name,
        fault.text,
        fault.change,
        fault.line,
        low_bytes,
        high_bytes,
        low_us,
        high_us,
        is_certain=fault.is_certain,
        advice=fault.advice if fault.advice in advised else "",
        share=min(max(of_peak, of_step), 1.0),
    )
