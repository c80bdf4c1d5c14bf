"""How the page sets figures and names: real minus signs and arrows, and where names and commands may break."""

from __future__ import annotations

import re
from collections.abc import Callable

from markupsafe import Markup, escape

_MINUS = re.compile(r"(?<![\w.)\]-])-(?=\d[\d,.]*(?: ?(?:[KMGT]?i?B|µs|ms|s|min|%))\b|\d[\d,.]*%)")
_ARROWS = (("<-", "\u2190"), ("->", "\u2192"))
_PARTS = re.compile(r"[^.]+\.*|\.+")
_LONG = 40  # letters of one part of a name, which is then broken anywhere


def signs(text: str) -> str:
    """A text whose negative amounts have a minus sign, and whose arrows are arrows: "-3.00 MiB", "2 -> 4".

    For texts of ours: in a command a minus is what is typed.
    """
    for typed, arrow in _ARROWS:
        text = text.replace(f" {typed} ", f" {arrow} ")
    return _MINUS.sub("\u2212", text)


def layer_name(text: str) -> Markup:
    """A layer's name that breaks after a dot and nowhere else."""
    parts = _PARTS.findall(text)
    if not parts or max(map(len, parts)) > _LONG:
        return escape(text)
    kept = (Markup('<span class="name">{}</span>').format(part) if "-" in part else escape(part) for part in parts)
    return Markup("<wbr>").join(kept)


def command(text: str) -> Markup:
    """A command that breaks between its words, not after the dashes of an option."""
    words = (
        Markup('<span class="name">{}</span>').format(word) if "-" in word and len(word) <= _LONG else escape(word)
        for word in text.split(" ")
    )
    return Markup(" ").join(words)


def source_line(text: str) -> Markup:
    """A file, line and function that break after a folder: "examples/train.py:7 (main)"."""
    return Markup("/<wbr>").join(escape(part) for part in text.split("/"))


def step_time(text: str) -> Markup:
    """A step's time with its interval in lighter letters: "2.71 s (2.50 to 3.00)"."""
    time, _, interval = text.partition(" (")
    return escape(time) + (Markup(' <span class="interval">({}</span>').format(interval) if interval else "")


FILTERS: dict[str, Callable[[str], str]] = {
    "signs": signs,
    "layer_name": layer_name,
    "command": command,
    "source_line": source_line,
    "step_time": step_time,
}
