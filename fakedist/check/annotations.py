"""Findings at the lines that cause them: GitHub annotations, and SARIF 2.1.0 for code scanning."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from fakedist._version import __version__
from fakedist.check.checking import Checked

_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+) \(.*\)")
_RULES = {
    "budget": "A figure of a rank is above its budget.",
    "baseline": "A figure of a rank grew more than its baseline allows.",
    "fits": "A rank does not fit its GPU.",
    "script": "A script failed, so nothing was judged.",
}


def github_annotations(checked: Checked) -> list[str]:
    """GitHub workflow commands that mark the lines in a pull request.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    lines = [f"::warning title=fakedist::{_escaped(warning)}" for warning in checked.warnings]
    for rule, message, file, line in _marks(checked):
        place = f"file={_escaped(file, is_property=True)},line={line},"
        lines.append(f"::error {place}title=fakedist {rule}::{_escaped(message)}")
    return lines


def sarif_text(checked: Checked) -> str:
    """The findings as SARIF 2.1.0. Paths are relative to the configuration's directory."""
    results = [
        {
            "ruleId": rule,
            "ruleIndex": list(_RULES).index(rule),
            "level": "error",
            "message": {"text": message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"},
                        "region": {"startLine": line},
                    }
                }
            ],
            # The figure, not its value, identifies a result.
            "partialFingerprints": {"fakedist/v1": message.partition(" is ")[0]},
        }
        for rule, message, file, line in _marks(checked)
    ]
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in _RULES.items()]
    driver = {"name": "fakedist", "semanticVersion": __version__, "rules": rules}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results, "columnKind": "unicodeCodePoints"}],
    }
    return json.dumps(log, indent=2) + "\n"


def _marks(checked: Checked) -> list[tuple[str, str, str, int]]:
    """The rule, message, file and line of everything that is wrong."""
    found = []
    for finding in checked.exceeded:
        rule = "budget" if finding.is_over_budget else "baseline"
        found.append((rule, finding.message, *_place(checked, finding.line)))
    found += [("fits", misfit, *_place(checked, "")) for misfit in checked.misfits]
    return found + [("script", failure.message, *_place(checked, "")) for failure in checked.failures]


def _place(checked: Checked, line: str) -> tuple[str, int]:
    """The file and line, if the file is below the configuration's directory. Otherwise the configuration, line 1."""
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
