"""Converts bytes, microseconds and ranks to text and back. No other module defines a GiB.

Ranks are ``0,4,8``, ``0-15`` or ``0-1023:64``, every 64th one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from fakedist.errors import JobError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

#: What "unlimited" memory means: more than any GPU has.
UNLIMITED_BYTES = 1 << 46

_FACTORS = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _FACTORS[f"{_letter}IB"] = 1024**_power
    _FACTORS[f"{_letter}B"] = 1000**_power
_US = {"us": 1, "µs": 1, "\u03bcs": 1, "ms": 1_000, "s": 1_000_000, "min": 60_000_000}
_SIZE = re.compile(r"\s*(\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})\s*([A-Za-z\u00b5\u03bc]+)\s*")


def format_bytes(size: float) -> str:
    """Bytes as text in the largest binary unit that fits, with two decimals: "72.00 GiB", "512 B", "-1.50 MiB"."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size) >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:.0f} B"


def format_us(duration_us: float) -> str:
    """Microseconds as text: "0 µs", "2.4 µs", "850 µs", "7.30 ms", "73.0 ms", "1.26 s", "12.6 s", "3 min 20 s"."""
    if abs(duration_us) < 0.05:
        return "0 µs"
    if abs(duration_us) < 99.95:
        return f"{duration_us:.1f} µs"
    if abs(duration_us) < 999.5:
        return f"{duration_us:.0f} µs"
    if abs(duration_us) < 1_000_000:
        return f"{_three_digits(duration_us / 1_000)} ms"
    if abs(duration_us) < 60_000_000:
        return f"{_three_digits(duration_us / 1_000_000)} s"
    minutes, seconds = divmod(round(duration_us / 1_000_000), 60)
    return f"{minutes} min {seconds} s"


def format_age(duration_s: float) -> str:
    """Seconds as text in the largest unit that fits: "12 s", "5 min", "3 h", "12 days"."""
    for unit, seconds in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if duration_s >= (2 if unit == "days" else 1) * seconds:
            return f"{duration_s // seconds:.0f} {unit}"
    return f"{max(int(duration_s), 0)} s"


def _three_digits(amount: float) -> str:
    return f"{amount:.2f}" if abs(amount) < 9.995 else f"{amount:.1f}"


def format_change(bytes_: float) -> str:
    """Bytes with a sign: "+2.91 GiB", "-512 B", "0 B"."""
    return ("+" if bytes_ > 0 else "") + format_bytes(bytes_)


def format_us_change(duration_us: float) -> str:
    """Microseconds with a sign: "+12.3 ms", "-3.0 µs", "0 µs"."""
    text = format_us(duration_us)
    return f"+{text}" if duration_us > 0 and not text.startswith("0 ") else text


def format_relative(change: float, of: float) -> str:
    """A change in percent of the former value; empty if that was 0."""
    return f"{change / of:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%") if of else ""


def format_number(value: float) -> str:
    """A rate, a number of tokens or a percentage: "1,702", "43.0"."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def format_flops(flops: float) -> str:
    """Floating-point operations as text, in decimal units: "412.3 TFLOP"; for a rate, append "/s"."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(flops) >= factor:
            return f"{flops / factor:,.1f} {unit}FLOP"
    return f"{flops:.0f} FLOP"


def parse_bytes(text: str) -> int:
    """Parse a size with a unit to bytes: "72 GiB" (binary), "80GB" (decimal), "unlimited" (:data:`UNLIMITED_BYTES`).

    Raises:
        JobError: The text is not a size, has no unit, or is not positive.
    """
    if text.strip().lower() == "unlimited":
        return UNLIMITED_BYTES
    hint = "write it like 80GiB, 80GB or unlimited"
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2).upper() not in _FACTORS:
        raise JobError(f"{text!r} is not a size with a unit", hint)
    size = int(float(match.group(1)) * _FACTORS[match.group(2).upper()])
    if size <= 0:
        raise JobError(f"{text!r} is not more than zero bytes", hint)
    return size


def parse_us(text: str) -> int:
    """Parse a duration with a unit to microseconds: "850 us", "900 ms", "1.5 s", "2 min".

    Raises:
        JobError: The text is not a duration, has no unit, or is not positive.
    """
    hint = "write it like 900 ms or 1.5 s"
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2) not in _US:
        raise JobError(f"{text!r} is not a duration with a unit", hint)
    duration = int(float(match.group(1)) * _US[match.group(2)])
    if duration <= 0:
        raise JobError(f"{text!r} is not more than zero", hint)
    return duration


def parse_percent(text: str) -> float:
    """Parse a share in percent: "1%" is 0.01.

    Raises:
        JobError: The text is not a percentage, or is negative.
    """
    number = text.strip().removesuffix("%").strip()
    if not text.strip().endswith("%") or not re.fullmatch(r"\d+(\.\d*)?|\.\d+", number):
        raise JobError(f"{text!r} is not a share in percent", "write it like 1%")
    return float(number) / 100


#: More ranks than any job has. A list with more would only fill the memory.
MAX_RANKS = 1 << 24
_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?::([1-9]\d{0,17}))?)?")


def parse_rank_list(text: str) -> tuple[int, ...]:
    """Parse a list of ranks: numbers, inclusive ranges, and ranges with a step.

    Raises:
        JobError: The text is not such a list, or a rank appears twice.
    """
    listed: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise _refused(text)
        first, last, step = match.groups()
        ranks = range(int(first), int(last or first) + 1, int(step or 1))
        if not ranks or len(listed) + len(ranks) > MAX_RANKS:
            raise _refused(text)
        listed.extend(ranks)
    if len(set(listed)) < len(listed):
        twice = next(rank for rank, after in itertools.pairwise(sorted(listed)) if rank == after)
        raise JobError(f"{text} has rank {twice} twice", "give each rank once")
    return tuple(listed)


def format_rank_list(ranks: Sequence[int]) -> str:
    """Ranks as text that :func:`parse_rank_list` reads: "0,3,5" or "0-56:8". Empty without ranks."""
    if len(ranks) < 3:
        return ",".join(map(str, ranks))
    step = ranks[1] - ranks[0]
    if step > 0 and all(after - before == step for before, after in itertools.pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" + ("" if step == 1 else f":{step}")
    return ",".join(map(str, ranks))


def _refused(text: str) -> JobError:
    return JobError(f"{text!r} is not a list of ranks", "write it like 0,4,8 or 0-15 or 0-1023:64")
