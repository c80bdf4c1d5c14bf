from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fakedist.launcher.machine import ProcessTree, descendants

# A child with a child of its own; both say who they are, and wait.
_FAMILY = """
import subprocess, sys
held = "held = b'x' * (64 << 20); print(len(held), flush=True); input()"
child = subprocess.Popen([sys.executable, "-S", "-c", held], stdin=sys.stdin, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A child and a grandchild that holds 64 MiB."""
    command = [sys.executable, "-S", "-c", _FAMILY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield child.pid, int(child.stdout.readline())


def test_descendants_are_found_however_deep(family: tuple[int, int]) -> None:
    child, grandchild = family
    assert {child, grandchild} <= descendants(os.getpid())
    assert descendants(child) == {grandchild}
    assert descendants(grandchild) == set()


def test_their_memory_counts_together(family: tuple[int, int]) -> None:
    assert ProcessTree(family[0]).rss_bytes() > 64 << 20
    assert ProcessTree(family[1]).rss_bytes() == 0


def test_all_of_them_are_killed_and_not_the_root(family: tuple[int, int]) -> None:
    child, grandchild = family
    ProcessTree(child).kill()
    assert grandchild not in descendants(os.getpid())
    assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is not None  # it ends by itself after its child
