"""The tokens that each request generates, as ``--lengths`` gives them: forms, and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fakedist.bounded import UnreadableError, read_bytes
from fakedist.errors import JobError

FORMS = "N, uniform:LEAST:MOST, lognormal:MEAN:SIGMA or lognormal:MEAN:SIGMA:MOST, or a file of a length a line"
_EXAMPLE = "--lengths lognormal:1024:0.8:8192"
_MOST_LENGTH = 1 << 24
_MOST_SIGMA = 10.0
_MOST_BYTES = 1 << 24
#: Draws of a distribution: the estimate is their mean, and how far they lie apart widens its interval.
NUM_DRAWS = 8


def request_lengths(text: str, num_requests: int | None) -> list[list[int]]:
    """The lengths of all requests in the order in which they arrive, once, or drawn from a distribution several times.

    ``num_requests`` is None for as many as the file has lines.

    Raises:
        JobError: The text is none of :data:`FORMS`, the file cannot be read, or the number of requests is missing or
            another than that of its lines.
    """
    name, *parameters = text.split(":")
    draws = {"uniform": _uniform, "lognormal": _lognormal}.get(name)
    if draws is None and not _is_length(text):
        return [_lengths_of(Path(text), num_requests)]
    if num_requests is None:
        raise JobError(f"--lengths {text} does not say how many requests there are", "--requests 512")
    if draws is None:
        return [[int(text)] * num_requests]
    drawn = [draws(text, parameters, num_requests, seed) for seed in range(NUM_DRAWS)]
    return [np.clip(np.rint(lengths), 1, _MOST_LENGTH).astype(int).tolist() for lengths in drawn]


def _uniform(text: str, parameters: list[str], number: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    least, most = _numbers(text, parameters, (2,))
    if not 1 <= least <= most <= _MOST_LENGTH:
        raise _refused(text, f"needs 1 <= LEAST <= MOST <= {_MOST_LENGTH:,}")
    return np.random.default_rng(seed).integers(int(least), int(most) + 1, number).astype(np.float64)


def _lognormal(
    text: str, parameters: list[str], number: int, seed: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    mean, sigma, *rest = _numbers(text, parameters, (2, 3))
    most = rest[0] if rest else float(_MOST_LENGTH)
    if not 1 <= mean <= _MOST_LENGTH or not 0 <= sigma <= _MOST_SIGMA or not 1 <= most <= _MOST_LENGTH:
        raise _refused(text, f"needs MEAN and MOST from 1 to {_MOST_LENGTH:,} and SIGMA from 0 to {_MOST_SIGMA:g}")
    # MEAN is that of the distribution before what is longer than MOST is cut off.
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, number)
    return np.minimum(drawn, most)


def _numbers(text: str, parameters: list[str], counts: tuple[int, ...]) -> list[float]:
    try:
        values = [float(parameter) for parameter in parameters]
    except ValueError:
        values = []
    if len(values) not in counts or not all(map(np.isfinite, values)):
        raise _refused(text, f"is {FORMS}")
    return values


def _is_length(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= _MOST_LENGTH


def _lengths_of(path: Path, num_requests: int | None) -> list[int]:
    try:
        lines = read_bytes(path, _MOST_BYTES).decode("ascii", "replace").split()
    except OSError as error:
        raise JobError(f"--lengths {path} is {FORMS}; as a file: {error.strerror}", _EXAMPLE) from error
    except UnreadableError as error:
        raise JobError(
            f"--lengths {path} is not a file of lengths: {error}", "write one number of tokens a line"
        ) from error
    for number, line in enumerate(lines, 1):
        if not _is_length(line):
            raise JobError(f"{path}, line {number}: {line[:40]!r} is not a number of tokens", "write one a line")
    if not lines or num_requests not in (None, len(lines)):
        raise JobError(f"{path} has {len(lines):,} lengths, and --requests is {num_requests}", "leave --requests out")
    return [int(line) for line in lines]


def _refused(text: str, why: str) -> JobError:
    return JobError(f"--lengths {why}, not {text!r}", _EXAMPLE)
