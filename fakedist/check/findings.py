"""The result of a check as text: a table, and a line for each exceeded figure."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fakedist.check.checking import Checked
from fakedist.check.judging import Finding
from fakedist.report.compare.comparison import format_relative
from fakedist.report.text.markdown import escaped, markdown_table
from fakedist.report.text.sheet import SheetColumn, print_long, print_table


def finding_columns(findings: list[Finding]) -> list[SheetColumn]:
    """The columns of the table of findings."""
    columns = [
        SheetColumn("job", [finding.job for finding in findings], is_text=True),
        SheetColumn("rank", [str(finding.rank) for finding in findings]),
        SheetColumn("figure", [finding.name for finding in findings], is_text=True),
        SheetColumn("is", [finding.amount(finding.value) for finding in findings]),
        SheetColumn("budget", [_amount(finding, finding.budget) for finding in findings]),
        SheetColumn("baseline", [_amount(finding, finding.baseline) for finding in findings]),
        SheetColumn("change", [_change(finding) for finding in findings]),
        SheetColumn("allowed", [finding.tolerance and f"+{finding.tolerance}" for finding in findings], rank=1),
        SheetColumn("", [verdict(finding) for finding in findings], is_text=True),
    ]
    # Budgets without baselines, and baselines without budgets, leave empty columns.
    return [column for column in columns if any(column.cells)]


def verdict(finding: Finding) -> str:
    """The verdict on a finding in one word. Empty if it has no limit."""
    if finding.is_over_budget:
        return "EXCEEDED"
    if finding.is_over_baseline:
        return "GREW"
    return "" if finding.budget is None and finding.allowed is None else "ok"


def render_checked(checked: Checked, console: Console) -> None:
    """Print the result of a check: warnings and notes, the table, what is exceeded."""
    for warning in checked.warnings:
        print_long(console, Text(warning, style="yellow"))
    for note in checked.notes:
        print_long(console, Text(note, style="dim"))
    if checked.findings:
        print_table(
            console,
            f"{checked.config.path.name}: memory, measured{times_title(checked)}",
            finding_columns(checked.findings),
        )
    lines = [finding.message for finding in checked.exceeded]
    if lines or checked.misfits:
        console.print()
    for line in (*lines, *checked.misfits):
        print_long(console, Text(line, style="bold red"))
    for path in checked.updated:
        print_long(console, Text(f"written: {path}"))


def checked_markdown(checked: Checked) -> str:
    """The result of a check as Markdown."""
    lines = [f"### fakedist check: {outcome(checked)}", ""]
    lines += [f"- {escaped(told)}" for told in (*checked.warnings, *checked.notes)]
    lines += [f"- **{escaped(finding.message)}**" for finding in checked.exceeded]
    lines += [f"- **{escaped(misfit)}**" for misfit in checked.misfits]
    for failure in checked.failures:
        lines += [f"- **{escaped(failure.message)}**", "", "```", failure.output.replace("```", "'''"), "```"]
    if checked.findings:
        lines += ["", *markdown_table(finding_columns(checked.findings))]
    return "\n".join(lines) + "\n"


def checked_object(checked: Checked) -> dict[str, object]:
    """The result of a check as ``--json`` prints it."""
    return {
        "exit_code": checked.exit_code,
        "warnings": checked.warnings,
        "notes": checked.notes,
        "failures": [{"message": each.message, "output": each.output} for each in checked.failures],
        "misfits": checked.misfits,
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
            for finding in checked.findings
        ],
    }


def times_title(checked: Checked) -> str:
    """The part of the table's title about times: "; times estimated". Empty without times."""
    sources = sorted({finding.source for finding in checked.findings if finding.source})
    return f"; times {' and '.join(sources)}" if sources else ""


def outcome(checked: Checked) -> str:
    """The outcome of a check in a few words."""
    if checked.failures:
        return f"{_many(len(checked.failures), 'script')} failed, so nothing was judged"
    if checked.misfits:
        return f"{_many(len(checked.misfits), 'rank')} did not fit the GPU"
    if checked.exceeded:
        return f"{_many(len(checked.exceeded), 'figure')} exceeded"
    return "all within budget"


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _amount(finding: Finding, value: float | None) -> str:
    return "" if value is None else finding.amount(value)


def _change(finding: Finding) -> str:
    if finding.baseline is None:
        return ""
    change = finding.value - finding.baseline
    if not change:
        return "0"
    share = format_relative(int(change), int(finding.baseline))
    amount = ("+" if change > 0 else "") + finding.amount(change)
    return f"{amount} ({share})" if share else amount
