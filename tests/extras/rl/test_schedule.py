"""The engine's steps: by hand, and against one step and one token at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from fakedist.errors import JobError
from fakedist.extras.rl.schedule import EngineLimits, EngineSteps, engine_steps

LARGE = EngineLimits(cache_tokens=1 << 30, max_running=1024, step_tokens=16384)


def _rows(lengths: list[int], prompt: int, limits: EngineLimits) -> list[EngineSteps]:
    return [EngineSteps(*map(int, row)) for row in engine_steps(lengths, prompt, limits).itertuples(index=False)]


def test_one_request_computes_its_prompt_and_then_a_token_a_step() -> None:
    prompt = EngineSteps(1, decoding=0, context=0, prefill=3, prompts=1, squares=9, ended=1)
    assert _rows([5], 3, LARGE) == [prompt, EngineSteps(4, decoding=1, context=4)]


def test_a_request_of_one_token_ends_with_its_prompt() -> None:
    assert [row.steps for row in _rows([1, 1], 7, LARGE)] == [1]


def test_a_long_prompt_is_computed_in_parts_next_to_what_decodes() -> None:
    rows = _rows([4, 4], 6, EngineLimits(cache_tokens=100, max_running=2, step_tokens=8))
    assert rows[0] == EngineSteps(1, 0, 0, prefill=8, prompts=2, squares=6**2 + 2**2, ended=1)
    assert rows[1] == EngineSteps(1, 1, 7, prefill=4, prompts=1, squares=6**2 - 2**2, ended=1)


def test_the_last_to_begin_gives_its_slots_back_and_computes_them_anew() -> None:
    rows = _rows([10, 10], 4, EngineLimits(cache_tokens=16, max_running=2, step_tokens=100))
    # Both hold 4 + 4 slots after four steps, and there are 16. The second then waits until the first has ended.
    assert rows[1] == EngineSteps(4, 2, 10)
    assert rows[2] == EngineSteps(1, 1, 9, waiting=1)
    assert rows[-2] == EngineSteps(1, 0, 0, prefill=9, prompts=1, squares=81, ended=1), "prompt and five tokens"
    assert rows[-1].steps == 4


def test_no_more_run_than_may() -> None:
    rows = _rows([3] * 10, 2, EngineLimits(cache_tokens=1000, max_running=4, step_tokens=100))
    assert max(row.decoding for row in rows) == 4


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(JobError, match="a request of 13 tokens does not fit into a KV cache of 12"):
        engine_steps([10, 3], 4, EngineLimits(12, 2, 100))
    with pytest.raises(JobError, match="a step of 8 tokens cannot decode 16 requests"):
        engine_steps([1], 4, EngineLimits(100, 16, 8))


@dataclass
class _Request:
    prompt: int
    length: int
    generated: int = 0
    computed: int = 0

    @property
    def wanted(self) -> int:
        """Tokens whose keys and values it needs before it decodes."""
        return self.prompt + self.generated


def _one_step_at_a_time(lengths: list[int], prompt: int, limits: EngineLimits) -> list[tuple[int, ...]]:
    """Each step's decoding, context, prefill, prompts, squares, ended, waiting: by counting every request's tokens."""
    waiting = [_Request(prompt, length) for length in lengths]
    running: list[_Request] = []
    steps: list[tuple[int, ...]] = []
    decodes: set[int] = set()
    while waiting or running:
        decoding = [request for request in running if id(request) in decodes]
        gave_back = False
        # A request whose prompt is partly computed has slots for all of it.
        while True:
            used = sum(r.computed if id(r) in decodes else r.wanted for r in running)
            if not decoding or used + len(decoding) <= limits.cache_tokens:
                break
            last = running.pop()
            decodes.discard(id(last))
            last.computed = 0
            waiting.insert(0, last)
            decoding = [request for request in running if id(request) in decodes]
            gave_back = True
        context, budget = 0, limits.step_tokens
        for request in decoding:
            request.computed += 1
            request.generated += 1
            context += request.computed
            budget -= 1
        prefill = prompts = squares = 0
        ended: list[_Request] = []
        while budget and not gave_back:
            partial = [r for r in running if id(r) not in decodes and r not in ended]
            if not partial:
                used = sum(r.computed if id(r) in decodes else r.wanted for r in running)
                if not waiting or len(running) == limits.max_running or used + waiting[0].wanted > limits.cache_tokens:
                    break
                running.append(waiting.pop(0))
                partial = running[-1:]
            request = partial[0]
            part = min(budget, request.wanted - request.computed)
            squares += (request.computed + part) ** 2 - request.computed**2
            request.computed += part
            prefill, prompts, budget = prefill + part, prompts + 1, budget - part
            if request.computed == request.wanted:
                ended.append(request)
        for request in ended:
            decodes.add(id(request))
            request.generated += 1
        running = [request for request in running if request.generated < request.length]
        steps.append((len(decoding), context, prefill, prompts, squares, len(ended), len(waiting)))
    return steps


@pytest.mark.parametrize("seed", range(60))
def test_steps_are_those_of_one_token_at_a_time(seed: int) -> None:
    draw = random.Random(seed)
    prompt, most = draw.randint(1, 20), draw.randint(1, 40)
    lengths = [draw.randint(1, most) for _ in range(draw.randint(1, 30))]
    running = draw.randint(1, 12)
    cache = prompt + max(lengths) - 1 + draw.choice([0, 3, 40, 1000])
    limits = EngineLimits(cache, running, running + draw.randint(0, 30))
    found: list[tuple[int, ...]] = []
    for row in _rows(lengths, prompt, limits):
        found += [(row.decoding, row.context + at * row.decoding, *row[3:]) for at in range(row.steps)]
    assert found == _one_step_at_a_time(lengths, prompt, limits)
