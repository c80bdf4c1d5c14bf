"""The steps of an engine that answers requests by continuous batching, as vLLM's scheduler makes them.

All requests are there at the beginning, and each generates as many tokens as it is given. A step computes one token of
every request that decodes, then, with what is left of the step's tokens, prompts in order of arrival. A prompt begins
only if all of it fits into the KV cache. If the cache has no slot for every request that decodes, the request that
began last gives its slots back and waits in front: its prompt and what it generated are computed anew.

Time plays no part: which tokens a step computes follows from the lengths alone. Steps without a prompt, an end or a
request that gives its slots back are alike, and are one row. The cache is counted in tokens, not in blocks of them, and
no two requests share the prefix of a prompt.

The tokens that each request generates, as ``--lengths`` gives them: forms, and files.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

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


@dataclass(frozen=True)
class EngineLimits:
    """The bounds of an engine's steps.

    Attributes:
        cache_tokens: Tokens whose keys and values the KV cache holds.
        max_running: Requests that are computed at once.
        step_tokens: Tokens that a step computes at most; not fewer than ``max_running``.
    """

    cache_tokens: int
    max_running: int
    step_tokens: int


class EngineSteps(NamedTuple):
    """A row: steps that follow one another, alike but for the contexts, which grow by a token each.

    Attributes:
        steps: How many.
        decoding: Requests that decode in each.
        context: Keys that all of these meet in the first of the steps.
        prefill: Prompts' tokens that the step computes.
        prompts: Prompts, or parts of one, that these are of.
        squares: Sum over prompts of the squares of tokens at the part's end less those at its begin: a self-attention
            of as many tokens as its root takes as many products.
        ended: Prompts that are complete after it, each with its first token.
        waiting: Requests that wait after it.
    """

    steps: int
    decoding: int
    context: int
    prefill: int = 0
    prompts: int = 0
    squares: int = 0
    ended: int = 0
    waiting: int = 0


def engine_steps(lengths: Sequence[int], prompt_tokens: int, limits: EngineLimits) -> pd.DataFrame:
    """The steps that generate as many tokens as ``lengths`` says for each request: rows of :class:`EngineSteps`.

    Raises:
        JobError: A request does not fit into the KV cache, or a step has fewer tokens than requests.
    """
    most = max(lengths) + prompt_tokens - 1
    if most > limits.cache_tokens:
        raise JobError(
            f"a request of {most:,} tokens does not fit into a KV cache of {limits.cache_tokens:,}",
            "give shorter --lengths, or a larger --kv-tokens",
        )
    if limits.max_running > limits.step_tokens:
        raise JobError(
            f"a step of {limits.step_tokens:,} tokens cannot decode {limits.max_running:,} requests",
            f"--max-running {limits.step_tokens}",
        )
    return pd.DataFrame(_Engine(list(lengths), prompt_tokens, limits).run(), columns=list(EngineSteps._fields))


@dataclass
class _Prompt:
    """The request whose prompt is only partly computed."""

    request: int
    tokens: int
    computed: int


@dataclass
class _Prefill:
    """Prompts' tokens of one step."""

    tokens: int = 0
    prompts: int = 0
    squares: int = 0
    complete: list[int] = field(default_factory=list)

    def add(self, prompt: _Prompt, tokens: int) -> None:
        end = prompt.computed + tokens
        self.tokens += tokens
        self.prompts += 1
        self.squares += end**2 - prompt.computed**2
        prompt.computed = end
        if end == prompt.tokens:
            self.complete.append(prompt.request)


class _Engine:
    def __init__(self, lengths: list[int], prompt_tokens: int, limits: EngineLimits) -> None:
        self._lengths, self._prompt, self._limits = lengths, prompt_tokens, limits
        self._waiting = deque(range(len(lengths)))
        self._generated = [0] * len(lengths)
        #: Decoding requests in the order in which they began -> the clock at which they have all their tokens.
        self._ends: dict[int, int] = {}
        self._by_end: list[tuple[int, int]] = []
        self._partial: _Prompt | None = None
        #: Steps so far.
        self._clock = 0
        self._cached = 0

    def run(self) -> Iterator[EngineSteps]:
        while self._waiting or self._ends or self._partial:
            yield self._next()

    def _next(self) -> EngineSteps:
        gave_back = False
        while self._ends and self._used() + len(self._ends) > self._limits.cache_tokens:
            self._give_back()
            gave_back = True
        num, context = len(self._ends), self._cached + len(self._ends)
        prefill = _Prefill() if gave_back else self._prefill(num)
        steps = 1 if gave_back or prefill.tokens else self._alike()
        self._clock += steps
        self._cached += num * steps
        self._end()
        for request in prefill.complete:
            self._begin(request)
        return EngineSteps(
            steps,
            num,
            context if num else 0,
            prefill.tokens,
            prefill.prompts,
            prefill.squares,
            len(prefill.complete),
            len(self._waiting),
        )

    def _used(self) -> int:
        return self._cached + (self._partial.tokens if self._partial else 0)

    def _tokens(self, request: int) -> int:
        """Tokens to compute before it decodes: its prompt and what it has generated."""
        return self._prompt + self._generated[request]

    def _give_back(self) -> None:
        if self._partial is not None:
            self._waiting.appendleft(self._partial.request)
            self._partial = None
            return
        request = next(reversed(self._ends))
        left = self._ends.pop(request) - self._clock
        self._generated[request] = self._lengths[request] - left
        self._cached -= self._tokens(request) - 1
        self._waiting.appendleft(request)

    def _prefill(self, num_decoding: int) -> _Prefill:
        limits, prefill = self._limits, _Prefill()
        budget = limits.step_tokens - num_decoding
        used = self._used() + num_decoding
        running = num_decoding + (self._partial is not None)
        while budget > 0:
            if self._partial is None:
                if not self._waiting or running >= limits.max_running:
                    break
                tokens = self._tokens(self._waiting[0])
                if used + tokens > limits.cache_tokens:
                    break
                self._partial = _Prompt(self._waiting.popleft(), tokens, 0)
                used, running = used + tokens, running + 1
            prompt = self._partial
            part = min(prompt.tokens - prompt.computed, budget)
            prefill.add(prompt, part)
            budget -= part
            if prompt.computed == prompt.tokens:
                self._partial = None
        return prefill

    def _alike(self) -> int:
        """Steps until a request ends or the cache is full: until then, nothing that waits can begin."""
        until_full = (self._limits.cache_tokens - self._used()) // len(self._ends)
        while self._ends.get(self._by_end[0][1]) != self._by_end[0][0]:
            heapq.heappop(self._by_end)
        return min(self._by_end[0][0] - self._clock, until_full)

    def _begin(self, request: int) -> None:
        """A request has its prompt computed, and with it the next token."""
        tokens = self._tokens(request)
        self._generated[request] += 1
        left = self._lengths[request] - self._generated[request]
        if not left:
            return
        self._ends[request] = self._clock + left
        heapq.heappush(self._by_end, (self._clock + left, request))
        self._cached += tokens

    def _end(self) -> None:
        while self._by_end and self._by_end[0][0] <= self._clock:
            end, request = heapq.heappop(self._by_end)
            if self._ends.get(request) == end:
                del self._ends[request]
                self._cached -= self._prompt + self._lengths[request] - 1
