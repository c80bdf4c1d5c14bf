from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typing_extensions import deprecated

from fakedist.gpu.values.inventions import LOOP_LIMIT, Inventions, Randoms, script_line


def test_integers_are_zero_floats_finite_bools_a_coin_and_the_seed_decides() -> None:
    def filled(tensor: torch.Tensor, seed: int = 0, **how: bool) -> torch.Tensor:
        Inventions(seed).fill(tensor, "op", **how)
        return tensor

    assert filled(torch.full((4,), 9)).tolist() == [0] * 4
    assert torch.isfinite(filled(torch.full((4,), torch.nan))).all()
    assert 0 < filled(torch.zeros(64, dtype=torch.bool)).sum() < 64
    assert (filled(torch.empty(64), non_negative=True) >= 0).all()  # a norm
    drawn = [filled(torch.empty(4), seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.uint32, torch.uint64])
def test_only_what_is_missing_is_made_up(dtype: torch.dtype) -> None:
    tensor = torch.tensor([5, 6, 7]).to(dtype)
    Inventions(0).draw_missing(tensor, torch.tensor([False, True, False]), non_negative=False)
    assert tensor.tolist() == [5, 0, 7]


def test_what_lacks_all_values_gets_the_same_as_where_each_is_named() -> None:
    all_of_them, each = torch.empty(4, 3).t(), torch.empty(3, 4)
    Inventions(0).draw_missing(all_of_them, None, non_negative=False)
    Inventions(0).draw_missing(each, torch.ones(3, 4, dtype=torch.bool), non_negative=False)
    assert torch.equal(all_of_them, each)


def test_an_element_that_no_memory_keeps_is_the_same_each_time() -> None:
    inventions = Inventions(0)
    large = torch.empty(10)
    assert inventions.element(large[3], "op").item() == inventions.element(large[3], "op").item()
    assert inventions.element(large[3], "op").item() != inventions.element(large[4], "op").item()


def test_counts_are_by_operation_and_line_and_taken_once() -> None:
    inventions = Inventions(0)
    for _ in range(3):
        inventions.count("aten.item", 2)
    ((operation, filename, line, calls, values),), idle = inventions.take()
    assert idle == []
    assert (operation, filename, calls, values) == ("aten.item", __file__, 3, 6)
    assert line > 0
    assert inventions.take() == ([], [])


def test_the_script_line_is_outside_of_torch_and_of_what_inductor_wrote() -> None:
    class Layer(torch.nn.Module):
        def forward(self) -> tuple[str, int]:
            return script_line()

    assert Layer()()[0] == __file__
    names = {"script_line": script_line}
    exec(compile("def call():\n    return script_line()", f"/cache/inductor/3x/c{'a7' * 25}q.py", "exec"), names)
    assert names["call"]()[0] == __file__


def test_the_line_of_a_deprecated_function_and_of_a_context_is_its_callers() -> None:
    lines = []

    @contextlib.contextmanager
    def unsynchronized() -> Iterator[None]:
        lines.append(script_line())
        yield

    @deprecated("there is a better one")
    def weight_norm() -> None:
        lines.append(script_line())

    # As torch's own, which is in none of the script's files.
    within: Any = unsynchronized
    within.__wrapped__.__code__ = within.__wrapped__.__code__.replace(co_filename=torch.__file__)
    with unsynchronized():
        pass
    weight_norm.__wrapped__.__code__ = weight_norm.__wrapped__.__code__.replace(co_filename=torch.__file__)  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="better"):
        weight_norm()
    assert [filename for filename, _ in lines] == [__file__] * 2


def test_a_line_that_only_computes_is_no_loop_that_waits() -> None:
    inventions = Inventions(0)
    for _ in range(LOOP_LIMIT + 10):
        missing = torch.full((1,), torch.nan)
        inventions.draw_missing(missing, None, non_negative=False)
    assert missing.abs().item() > 1e-30
    inventions.decide(True)
    assert "did not end" not in str(list(inventions.decisions()))


def test_a_loop_that_waits_for_another_answer_gets_it_and_the_note_says_where() -> None:
    inventions = Inventions(0)
    assert list(inventions.decisions()) == []
    answers = [inventions.decide(True) for _ in range(LOOP_LIMIT + 2)]
    assert answers == [True] * LOOP_LIMIT + [False, True]
    assert [inventions.decide(number) for number in (3, 0)] == [3, 0]
    (note,) = inventions.decisions()
    assert f"{LOOP_LIMIT + 2:,} times, true" in note.text
    assert "twice" in note.text or "2 times, 1 of them true" in note.text
    for _ in range(LOOP_LIMIT + 1):
        drawn = torch.full((1,), torch.nan)
        inventions.draw_missing(drawn, None, non_negative=False)
    assert drawn.item() == torch.finfo(torch.float32).tiny
    whole = [torch.empty(2) for _ in range(2 * LOOP_LIMIT + 1)]
    for host in whole:
        inventions.draw(host, torch.empty(2), "copy")
    assert whole[-1].tolist() == [-torch.finfo(torch.float32).tiny] * 2


def test_random_numbers_follow_from_seed_and_offset_and_leave_the_hosts_own_alone() -> None:
    randoms = Randoms(0)
    seeds = [randoms.generator(state).initial_seed() for state in ((1, 2), (1, 2), (2, 1), (1, 6))]
    assert seeds[0] == seeds[1] == 4533873174211652711
    assert len(set(seeds)) == 3
    before = torch.default_generator.get_state()
    with randoms.as_default((1, 2)):
        first = torch.rand(3)
    with randoms.as_default((1, 2)):
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.default_generator.get_state(), before)
