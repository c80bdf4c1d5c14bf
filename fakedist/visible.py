"""Makes text that came from a file safe to print: no control character of it reaches a terminal."""

from __future__ import annotations

import re

#: Longer names are cut where they are shown. Paths and names of layers are shorter.
MOST_OF_A_NAME = 300
#: Longer sentences and commands are cut where they are shown.
MOST_OF_A_TEXT = 20_000

# C0, DEL and C1 of ISO 6429, by which a terminal is steered, and the bytes of C1 that Python keeps as surrogates. And
# Unicode's separators of lines, and what turns the direction of text, by which a command may look like another.
_OTHERS = "\x7f-\x9f\udc80-\udc9f\u2028-\u202e\u2066-\u2069"
_CONTROLS = re.compile(f"[\x00-\x1f{_OTHERS}]")
_CONTROLS_WITHIN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_OTHERS}]")


def visible(text: str, most: int = MOST_OF_A_NAME) -> str:
    """A text of one line with its control characters written out, each by its hexadecimal number after a backslash.

    A text of more than ``most`` characters is cut, and says how long it was.
    """
    text = shortened(text, most)
    return _CONTROLS.sub(_written_out, text) if _CONTROLS.search(text) else text


def shortened(text: str, most: int) -> str:
    """A text with at most so many characters. A longer one is cut, and says how long it was."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def visible_lines(text: str) -> str:
    """A text of several lines with its control characters written out, except for line feeds and tabs."""
    return _CONTROLS_WITHIN_LINES.sub(_written_out, text) if _CONTROLS_WITHIN_LINES.search(text) else text


def _written_out(match: re.Match[str]) -> str:
    number = ord(match.group())
    return f"\\u{number:04x}" if 0x2000 <= number < 0x3000 else f"\\x{number & 0xFF:02x}"
