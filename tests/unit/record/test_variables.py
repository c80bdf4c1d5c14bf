from __future__ import annotations

import gc
import weakref

from fakedist.record.copies import variable_name


class Thing:
    pass


class Holder:
    def __init__(self, held: object) -> None:
        self.target_network = held


class Wrapper:
    def __init__(self, held: object) -> None:
        self.module = held


def test_a_local_variable_gives_its_name() -> None:
    ema = Thing()
    assert variable_name(ema) == "ema"


def test_a_variable_of_a_closure_gives_its_name() -> None:
    best = Thing()
    assert (lambda: variable_name(best))() == "best"
    assert [variable_name(best) for _ in range(1)] == ["best"]


def test_an_attribute_gives_its_name_and_a_wrappers_that_of_the_wrapper() -> None:
    kept = [Holder(Thing())]
    assert variable_name(kept[0].target_network) == "target_network"
    averaged = Wrapper(Thing())
    assert variable_name(averaged.module) == "averaged"


def test_what_no_variable_holds_has_no_name() -> None:
    kept = [Thing()]
    assert variable_name(kept[0]) == ""


def test_looking_keeps_nothing_alive() -> None:
    ema, other = Thing(), Thing()
    gone = weakref.ref(other)
    assert variable_name(ema) == "ema"
    del other
    gc.collect()
    assert gone() is None
