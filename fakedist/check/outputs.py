"""The result of a check: as text, as GitHub annotations at lines, and as JUnit XML.

It is valid against both schemas in use: Jenkins' (xunit plugin) and Apache Ant's (windyroad/JUnit-Schema).
"""

from __future__ import annotations

import datetime
import re
import socket
from functools import partial
from xml.etree import ElementTree

from fakedist.check.checking import Checked, difference_blocks
from fakedist.check.judging import JudgedFigure
from fakedist.report.content.report_blocks import Block, Items, Remark, Report, Sheet, SheetColumn, Verdict
from fakedist.rundir.notes import counted, listed
from fakedist.rundir.plain import to_plain
from fakedist.units import format_relative

_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+) \(.*\)")


def github_annotations(checked: Checked) -> list[str]:
    """GitHub workflow commands that mark the lines in a pull request.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    lines = [f"::warning title=fakedist::{_escaped(warning)}" for warning in checked.warnings]
    for rule, message, file, line in _marks(checked):
        position = f"file={_escaped(file, is_property=True)},line={line},"
        lines.append(f"::error {position}title=fakedist {rule}::{_escaped(message)}")
    return lines


def _marks(checked: Checked) -> list[tuple[str, str, str, int]]:
    marks = []
    for finding in checked.exceeded:
        rule = "budget" if finding.is_over_budget else "baseline"
        marks.append((rule, finding.message, *_location(checked, finding.line)))
    marks += [("fits", misfit, *_location(checked, "")) for misfit in checked.misfits]
    marks += [("match", mismatch.text, *_location(checked, mismatch.line)) for mismatch in checked.mismatches]
    marks += [(found.finding.code, found.text, *_location(checked, found.finding.line)) for found in checked.findings]
    return marks + [("script", failure.message, *_location(checked, "")) for failure in checked.failures]


def _location(checked: Checked, line: str) -> tuple[str, int]:
    match = _LINE.fullmatch(line)
    if match is not None:
        path = checked.config.root / match["file"]
        if path.is_relative_to(checked.config.root) and path.is_file():
            return path.relative_to(checked.config.root).as_posix(), int(match["line"])
    return checked.config.path.name, 1


def _escaped(text: str, *, is_property: bool = False) -> str:
    marks = {"%": "%25", "\r": "%0D", "\n": "%0A"}
    marks |= {":": "%3A", ",": "%2C"} if is_property else {}
    for mark, code in marks.items():
        text = text.replace(mark, code)
    return text


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_text(checked: Checked) -> str:
    """The result of a check as JUnit XML. A script that failed is an error, an exceeded figure is a failure."""
    root = ElementTree.Element("testsuites")
    by_rank: dict[str, list[JudgedFigure]] = {}
    for finding in checked.judged:
        by_rank.setdefault(f"{finding.job} rank {finding.rank}", []).append(finding)
    for number, (name, findings) in enumerate(by_rank.items()):
        suite = _suite(root, name, number, len(findings), failures=sum(judged.is_exceeded for judged in findings))
        for finding in findings:
            case = _case(suite, finding.name, name)
            if finding.is_exceeded:
                _add_message(case, "failure", "budget" if finding.is_over_budget else "baseline", finding.message)
        _outputs(suite, "\n".join((*checked.warnings, *checked.notes)))
    for number, failure in enumerate(checked.failures, start=len(by_rank)):
        name = failure.message.partition(":")[0]
        suite = _suite(root, name, number, 1, errors=1)
        _add_message(_case(suite, "runs", name), "error", "script", failure.message)
        _outputs(suite, failure.output)
    for number, misfit in enumerate(checked.misfits, start=len(by_rank) + len(checked.failures)):
        name = misfit.partition(" does")[0]
        suite = _suite(root, f"{name} fits", number, 1, failures=1)
        _add_message(_case(suite, "fits the GPU", name), "failure", "out_of_memory", misfit)
        _outputs(suite, "")
    for number, mismatch in enumerate(checked.mismatches, start=len(root)):
        suite = _suite(root, f"{mismatch.job} match", number, 1, failures=1)
        _add_message(_case(suite, "calls match", mismatch.job), "failure", "match", mismatch.text)
        _outputs(suite, "")
    for number, found in enumerate(checked.findings, start=len(root)):
        name = found.text.partition(":")[0]
        suite = _suite(root, name, number, 1, failures=1)
        _add_message(_case(suite, found.finding.code, name), "failure", "finding", found.text)
        _outputs(suite, "")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True).replace("'utf-8'", "'UTF-8'") + "\n"


def _suite(root: ElementTree.Element, name: str, number: int, tests: int, **counts: int) -> ElementTree.Element:
    now = datetime.datetime.now().replace(microsecond=0).isoformat()
    attributes = {
        "name": _clean(name),
        "package": "fakedist",
        "id": str(number),
        "timestamp": now,
        "hostname": socket.gethostname() or "localhost",
        "tests": str(tests),
        "failures": str(counts.get("failures", 0)),
        "errors": str(counts.get("errors", 0)),
        "time": "0",
    }
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    ElementTree.SubElement(suite, "properties")
    return suite


def _case(suite: ElementTree.Element, name: str, of: str) -> ElementTree.Element:
    classname = f"fakedist.{of.replace(' rank ', '.rank')}"
    attributes = {"name": _clean(name), "classname": _clean(classname), "time": "0"}
    return ElementTree.SubElement(suite, "testcase", attributes)


def _add_message(case: ElementTree.Element, tag: str, kind: str, message: str) -> None:
    clean = _clean(message)
    ElementTree.SubElement(case, tag, {"message": clean, "type": kind}).text = clean


def _outputs(suite: ElementTree.Element, text: str) -> None:
    ElementTree.SubElement(suite, "system-out").text = _clean(text)
    ElementTree.SubElement(suite, "system-err")


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)


def check_report(checked: Checked) -> Report:
    """The result of a check: what came out, what is compared with other settings, every figure, and what fails it."""
    blocks: list[Block] = [Verdict(f"fakedist check: {outcome(checked)}", "outcome")]
    blocks += [Remark(text, is_warning=True) for text in checked.warnings] + [*map(Remark, checked.notes)]
    if checked.judged:
        sources = sorted({finding.source for finding in checked.judged if finding.source})
        times = f"; times {' and '.join(sources)}" if sources else ""
        title = f"{checked.config.path.name}: memory, measured{times}"
        blocks.append(Sheet(title, figure_columns(checked.judged), is_open=True))
    blocks += difference_blocks(checked.differences)
    if fails := [*(finding.message for finding in checked.exceeded), *checked.problems]:
        blocks.append(Items("Why it fails", fails))
    blocks += [Items(failure.message, failure.output.splitlines(), is_code=True) for failure in checked.failures]
    blocks += [Remark(f"written: {path}") for path in checked.updated]
    return Report("check", blocks, partial(_checked_object, checked))


def figure_columns(figures: list[JudgedFigure]) -> list[SheetColumn]:
    """The columns of the table of judged figures."""
    columns = [
        SheetColumn("job", [figure.job for figure in figures], is_text=True),
        SheetColumn("rank", [str(figure.rank) for figure in figures]),
        SheetColumn("figure", [figure.name for figure in figures], is_text=True),
        SheetColumn("is", [figure.amount(figure.value) for figure in figures]),
        SheetColumn("budget", [_amount(figure, figure.budget) for figure in figures]),
        SheetColumn("baseline", [_amount(figure, figure.baseline) for figure in figures]),
        SheetColumn("change", [_change(figure) for figure in figures]),
        SheetColumn("allowed", [figure.tolerance and f"+{figure.tolerance}" for figure in figures], rank=1),
        SheetColumn("", [verdict(figure) for figure in figures], is_text=True),
    ]
    # Budgets without baselines, and baselines without budgets, leave empty columns.
    return [column for column in columns if any(column.cells)]


def verdict(finding: JudgedFigure) -> str:
    """The verdict on a finding in one word. Empty if it has no limit."""
    if finding.is_over_budget:
        return "EXCEEDED"
    if finding.is_over_baseline:
        return "GREW"
    return "" if finding.budget is None and finding.allowed is None else "ok"


def _checked_object(checked: Checked) -> dict[str, object]:
    return {
        "exit_code": checked.exit_code,
        "warnings": checked.warnings,
        "notes": checked.notes,
        "failures": [{"message": failure.message, "output": failure.output} for failure in checked.failures],
        "misfits": checked.misfits,
        "mismatches": [mismatch.text for mismatch in checked.mismatches],
        "faults": [{"job": found.job, "rank": found.rank, **to_plain(found.finding)} for found in checked.findings],
        "differences": [rank.to_plain() for rank in checked.differences],
        "updated": [str(path) for path in checked.updated],
        "findings": [
            {
                "job": finding.job,
                "rank": finding.rank,
                "figure": finding.figure.kind,
                "source": finding.source or "measured",
                "part": finding.figure.part,
                **{key: getattr(finding, key) for key in ("value", "budget", "baseline", "allowed", "blame", "line")},
                "is_exceeded": finding.is_exceeded,
                "message": finding.message if finding.is_exceeded else "",
            }
            for finding in checked.judged
        ],
    }


def outcome(checked: Checked) -> str:
    """The outcome of a check in a few words."""
    if checked.failures:
        return f"{counted(len(checked.failures), 'script')} failed, so nothing was judged"
    if checked.misfits:
        return f"{counted(len(checked.misfits), 'rank')} did not fit the GPU"
    if checked.mismatches:
        return f"the calls of {counted(len(checked.mismatches), 'job')} do not match"
    reasons = [f"{counted(len(checked.exceeded), 'figure')} exceeded"] if checked.exceeded else []
    if checked.findings:
        reasons.append(counted(len(checked.findings), "finding"))
    if reasons:
        return listed(reasons)
    return "all within budget"


def _amount(finding: JudgedFigure, value: float | None) -> str:
    return "" if value is None else finding.amount(value)


def _change(finding: JudgedFigure) -> str:
    if finding.baseline is None:
        return ""
    change = finding.value - finding.baseline
    if not change:
        return "0"
    relative = format_relative(int(change), int(finding.baseline))
    amount = ("+" if change > 0 else "") + finding.amount(change)
    return f"{amount} ({relative})" if relative else amount
