"""The stacks of a page: one tree of frames, and which of them are libraries'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakedist.report.figures.memory_figures import read_curve
from fakedist.report.page import drawings
from fakedist.report.page.drawings import Pack, add_stacks, is_library
from fakedist.results.opening import open_run
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.report.handmade import built
from tests.unit.report.page.test_drawings import unpacked

MAIN, CALL, FORWARD = ("/job/train.py", 1, "main"), ("/x/site-packages/torch/nn.py", 2, "call"), ("/job/m.py", 3, "f")


def packed(directory: Path) -> tuple[dict[str, Any], dict[str, list[float]]]:
    made = HandMade()
    through, straight = made.stack(FORWARD, CALL, MAIN), made.stack(FORWARD, MAIN)
    unused = made.stack(CALL)
    made.op("forward", 1)
    for at, (stack, mib) in enumerate([(straight, 4), (through, 2), (straight, 1), (-1, 8)]):
        made.alloc(at * 10 * MIB, mib * MIB, stack=stack)
    assert (through, straight, unused) == (0, 1, 2)
    made.ended()
    run = open_run(built(made, directory))
    pack = Pack()
    assert add_stacks(pack, run, read_curve(run))
    return unpacked(pack.text())


def walked(meta: dict[str, Any], found: dict[str, list[float]], stack: int) -> list[str]:
    texts, node = [], int(found["stack_node"][stack])
    while node:
        texts.append(meta["frames"][int(found["node_frame"][node - 1])])
        node = int(found["node_parent"][node - 1])
    return texts


def test_every_stack_is_a_way_through_the_tree(tmp_path: Path) -> None:
    meta, found = packed(tmp_path / "run")
    call = next(text for text in meta["frames"] if "(call)" in text)
    assert [walked(meta, found, stack) for stack in range(2)] == [
        ["m.py:3 (f)", call, "train.py:1 (main)"],
        ["m.py:3 (f)", "train.py:1 (main)"],
    ]
    assert len(found["node_parent"]) == 4  # both begin in main
    assert found["stack_node"][2:] == [0, 0]  # no block has it; blocks without a stack
    library = dict(zip(meta["frames"], found["frame_library"], strict=True))
    assert [text for text, flag in library.items() if flag] == [call]


def test_stacks_that_no_page_can_hold_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawings, "MOST_NODES", 3)
    meta, found = packed(tmp_path / "run")
    assert walked(meta, found, 1) == ["m.py:3 (f)", "train.py:1 (main)"]  # it has the most bytes
    assert walked(meta, found, 0) == ["(1 stack with the fewest bytes: left out of this page)"]


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/home/me/train.py", False),
        ("train.py", False),
        ("/home/me/.venv/lib/python3.11/site-packages/transformers/trainer.py", True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", True),
        ("/usr/lib/python3.12/contextlib.py", True),
        ("/opt/pytorch/torch/nn/modules/module.py", True),
        ("/home/me/typing_extensions.py", True),
        ("<string>", True),
        ("??", True),
        ("", True),
        ("/build/c10/cuda/CUDACachingAllocator.cpp", True),
        ("/home/me/my.cpython.py", False),
        ("/home/me/lib/python/train.py", False),
    ],
)
def test_installed_generated_and_compiled_files_are_libraries(filename: str, expected: bool) -> None:
    assert is_library(filename) is expected
