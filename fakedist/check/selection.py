"""The findings that fail a check: ``select``, ``ignore`` and ``per-file-ignores``, as ruff has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from fakedist.errors import CheckError, did_you_mean
from fakedist.findings import finding_all  # noqa: F401 - registers the rules
from fakedist.findings.ignoring import path_of
from fakedist.findings.registry import RULES
from fakedist.rundir.finding import Finding
from fakedist.section import Section

_ALL = "ALL"


@dataclass(frozen=True)
class Selection:
    """Rules by their codes, or by what their codes begin with. The longest that fits wins; of two, what is ignored.

    Attributes:
        select: Rules that fail the check.
        ignore: Rules that do not.
        per_file_ignores: The same by a pattern of the path of a finding's line.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def takes(self, finding: Finding, root: Path) -> bool:
        """Whether a finding fails a check whose configuration is in ``root``."""
        selected, ignored = (_fitting(finding.code, codes) for codes in (self.select, self.ignore))
        if selected <= ignored:
            return False
        path = path_of(finding.line)
        names = {path, path.rpartition("/")[2]}
        if path and Path(path).is_relative_to(root):
            names.add(str(Path(path).relative_to(root)))
        return not any(
            _fitting(finding.code, codes) >= 0 and any(fnmatch(name, pattern) for name in names)
            for pattern, codes in self.per_file_ignores
        )


#: No finding fails the check.
NOTHING = Selection()


def _fitting(code: str, chosen: Sequence[str]) -> int:
    """The length of the longest of the chosen codes that fits; 0 for all rules, -1 if none fits."""
    return max(
        (0 if part == _ALL else len(part) for part in chosen if part == _ALL or code.startswith(part)), default=-1
    )


def read_selection(section: Section, default: Selection) -> Selection:
    """Take the three keys of a section, each by itself with a default.

    Raises:
        CheckError: There is no such rule, or a value is not a list of texts.
    """
    table = section.take_table("per-file-ignores")
    of_files = [(pattern, _codes(table, pattern)) for pattern, _ in table.items()]
    return Selection(
        _codes(section, "select") or default.select,
        _codes(section, "ignore") or default.ignore,
        tuple(of_files) or default.per_file_ignores,
    )


def _codes(section: Section, key: str) -> tuple[str, ...]:
    codes = section.take_texts(key)
    for code in codes:
        if code != _ALL and not (code and any(known.startswith(code) for known in RULES)):
            raise CheckError(f"{section.where}: {key}: there is no rule {code!r}", did_you_mean(code, list(RULES)))
    return codes
