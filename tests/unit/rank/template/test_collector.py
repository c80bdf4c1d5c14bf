from __future__ import annotations

import gc
import sys
import weakref

import pytest

from fakedist.rank.template.collector import OutermostImport, counts, set_counts


def test_the_counts_are_set_and_young_garbage_is_gone() -> None:
    class Node:
        pass

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    alive = weakref.ref(node)
    del node
    set_counts((300, 3))
    youngest, young = counts()
    assert (300 <= youngest < 310, young) == (True, 3)
    assert alive() is None


def test_a_script_that_turned_the_collector_off_is_left_alone() -> None:
    gc.disable()
    try:
        before = counts()
        set_counts((before[0] + 500, 0))
        assert counts()[0] < before[0] + 500
    finally:
        gc.enable()


def test_imports_inside_an_import_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    outermost = OutermostImport()
    assert outermost.begins("only_looked_for")
    assert outermost.begins("outer")
    monkeypatch.setitem(sys.modules, "outer", sys)
    assert not outermost.begins("inner")
    outermost.ends()
    assert outermost.begins("next")
