"""Loads of experts as ``--router-load`` gives them: forms, and files of counts."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

from fakedist.errors import JobError

EVEN = "even"
#: Workloads of NVIDIA/Megatron-LM#7488 (benchmarks/moe/token_imbalance/benchmark.py at f5c50249). A token picks among a
#: few hot experts, or among all. W2 is W1, whose hot experts are the first ranks' at any expert parallel size; W4 is
#: uneven only in the tokens that ranks have, which are the script's. Both pick as the benchmark does.
WORKLOADS = tuple(f"W{number}" for number in range(8))
FORMS = "even, zipf:S, lognormal:SIGMA, W0 to W7 or a file of counts (.jsonl)"
FILE_ENDING = ".jsonl"
_MOST_PARAMETER = 10.0


class RouterLoadError(JobError):
    """A load cannot be read, or does not fit the job."""

    def __init__(self, predicate: str) -> None:
        super().__init__(f"--router-load {predicate}", "--router-load zipf:0.5")
        self.predicate = predicate


class CountsLine(NamedTuple):
    """Tokens that each expert of a layer got in a step."""

    layer: int
    step: int
    top_k: int
    counts: tuple[int, ...]


def parse_router_load(text: str) -> str:
    """Return a load's text if it can be read. A file is not opened.

    Raises:
        RouterLoadError: It is none of :data:`FORMS`.
    """
    name, colon, parameter = text.partition(":")
    if text in (EVEN, *WORKLOADS) or text.endswith(FILE_ENDING):
        return text
    if name not in ("zipf", "lognormal") or not colon:
        raise RouterLoadError(f"is {FORMS}, not {text!r}")
    try:
        value = float(parameter)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_PARAMETER:  # nan too
        raise RouterLoadError(f"has a number from 0 to {_MOST_PARAMETER:g} after the colon, not {parameter!r}")
    return text


@functools.lru_cache(maxsize=4)
def lines_of(path: str) -> tuple[CountsLine, ...]:
    """The lines of a file, in the order of steps.

    Raises:
        RouterLoadError: It cannot be read, or its counts do not add up.
    """
    try:
        with open(path, encoding="utf-8") as file:
            texts = [text for text in file if text.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RouterLoadError(f"{path} cannot be read: {error}") from None
    lines = [_line(text, f"line {number} of {path}") for number, text in enumerate(texts, 1)]
    if not lines:
        raise RouterLoadError(f"{path} is empty")
    return tuple(sorted(lines, key=lambda line: (line.step, line.layer)))


def _line(text: str, where: str) -> CountsLine:
    try:
        values = json.loads(text)
        layer, step, tokens, top_k = (values[name] for name in ("layer", "step", "tokens", "top_k"))
        counts = tuple(values["counts"])
    except (ValueError, KeyError, TypeError):
        raise RouterLoadError(f"needs layer, step, tokens, top_k and counts in {where}") from None
    if not all(type(value) is int and value >= 0 for value in (layer, step, tokens, top_k, *counts)):
        raise RouterLoadError(f"has a value in {where} that is not a whole number from 0")
    if sum(counts) != tokens * top_k or not sum(counts):
        raise RouterLoadError(
            f"counts {sum(counts):,} choices in {where}, not {tokens:,} tokens x top-{top_k} = {tokens * top_k:,}"
        )
    if max(counts) > tokens:
        raise RouterLoadError(f"sends {max(counts):,} of {tokens:,} tokens to one expert in {where}")
    return CountsLine(layer, step, top_k, counts)
