from __future__ import annotations

import gc
import weakref

from fakedist.record.alive import all_alive


class Held(dict[str, int]):
    pass


def test_lists_and_dicts_are_found_by_what_they_hold() -> None:
    kept = [Held(one=1), Held(one=1, two=2), [1, 2], (1, 2)]
    holders = set(map(id, all_alive().holding({2})))
    assert [id(holder) in holders for holder in kept] == [False, True, True, False]


def test_a_search_keeps_nothing_alive() -> None:
    held = Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        living = all_alive()
        assert id(held) in map(id, living.of(lambda kind: kind is Held))
        del held, living
        assert gone() is None
    finally:
        gc.enable()
