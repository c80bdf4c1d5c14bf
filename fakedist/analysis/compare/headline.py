"""What was changed from one run to another, in a few words: "--loss-parallel", "world size 64 -> 128"."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fakedist.run.manifest import Manifest

_MOST = 3  # changes named one by one
#: Settings that follow from the others, or that do not change what the script does.
_NO_CAUSE = ("arguments", "steps that ended", "how it ended", "times")
_OPTION = re.compile(r"--?[A-Za-z]")


def changed_text(changes: Sequence[str]) -> str:
    """The changes in one phrase; empty without any."""
    if len(changes) <= _MOST + 1:
        return ", ".join(changes)
    return f"{', '.join(changes[:_MOST])} and {len(changes) - _MOST} more settings"


def changed_names(a: Manifest, b: Manifest, differences: Sequence[dict[str, str]]) -> list[str]:
    """Each change in a few words, those of the script's arguments first.

    Args:
        a: The manifest of one run.
        b: The manifest of the other.
        differences: The result of :func:`fakedist.analysis.compare.changed_settings.different_settings`.
    """
    found = changed_arguments(*([] if each.job is None else each.job.arguments for each in (a, b)))
    for row in differences:
        if row["name"] not in _NO_CAUSE:
            found.append(f"{row['name']} {row['a'] or '(none)'} -> {row['b'] or '(none)'}")
    return found


def changed_arguments(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """The arguments in which two command lines differ: "--loss-parallel", "--tp 8 -> 4", "no --checkpoint full".

    Args:
        a: The arguments of one script.
        b: The arguments of the other.
    """
    before, after = _options(a), _options(b)
    found = []
    for name, values in after.items():
        if name not in before:
            found.append(_spoken(name, values))
        elif before[name] != values:
            found.append(f"{_spoken(name, before[name])} -> {' '.join(values) or '(none)'}")
    return [*found, *(f"no {_spoken(name, values)}" for name, values in before.items() if name not in after)]


def _spoken(name: str, values: Sequence[str]) -> str:
    return " ".join([name, *values]).strip()


def _options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values of each option in their order; arguments before the first option have an empty name."""
    found: dict[str, list[str]] = {}
    name = ""
    for argument in arguments:
        if _OPTION.match(argument):
            name, is_given, value = argument.partition("=")
            found.setdefault(name, []).extend([value] if is_given else [])
        else:
            found.setdefault(name, []).append(argument)
    return found
