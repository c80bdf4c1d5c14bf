"""What the page's scripts compute, run by node, against the same figures from Python."""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import fakedist
from fakedist.analysis.calls import ranks_of

TEMPLATES = Path(fakedist.__file__).parent / "report" / "page" / "templates"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed")


def run_script(name: str, expression: str) -> object:
    """The value of an expression after a script of the page has been loaded."""
    assert NODE is not None
    text = f"{(TEMPLATES / name).read_text()}\nconsole.log(JSON.stringify({expression}));"
    finished = subprocess.run([NODE, "-"], input=text, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(finished.stdout)


def lives(num_moves: int) -> tuple[list[int], list[int]]:
    """For each block in order of allocation: after how many moves it is freed (0: never), and its bytes."""
    choose = random.Random(7)
    life: list[int] = []
    bytes_: list[int] = []
    alive: list[tuple[int, int]] = []  # block, and the move that made it
    for move in range(num_moves):
        if alive and choose.random() < 0.48:
            block, made = alive.pop(choose.randrange(len(alive)))
            life[block] = move - made
        else:
            alive.append((len(life), move))
            life.append(0)
            bytes_.append(choose.randint(1, 1000))
    return life, bytes_


def curve_of(life: list[int], bytes_: list[int]) -> list[int]:
    """What is held after each move."""
    change: dict[int, int] = {}
    move = 0
    for each, size in zip(life, bytes_, strict=True):
        while move in change:
            move += 1
        change[move] = size
        if each:
            change[move + each] = -size
        move += 1
    assert sorted(change) == list(range(len(change)))
    return np.cumsum([change[at] for at in range(len(change))]).tolist()


def test_any_stretch_of_the_timeline_has_its_largest_and_least_moment() -> None:
    life, bytes_ = lives(1_700)
    curve = curve_of(life, bytes_)
    meta = {"num_moves": len(curve), "names": ["all"], "colours": ["other"]}
    data = {"meta": meta, "block_life": life, "block_kind": list(range(len(life)))}
    data |= {"kind_bytes": bytes_, "kind_category": [0] * len(life)}
    # Whole buckets of 64 moves and of 8 times as many, and stretches that cut them.
    stretches = [(0, len(curve)), (64, 128), (0, 512), (512, 1536), (100, 101), (3, 700), (127, 1100), (640, 1290)]
    asked = ", ".join(f"timeline.range({first}, {end})" for first, end in stretches)
    found = run_script(
        "timeline.js", f"(() => {{ const timeline = new Timeline({json.dumps(data)}); return [{asked}]; }})()"
    )
    expected = [
        {"most": max(part), "where": first + part.index(max(part)), "least": min(part)}
        for first, end in stretches
        if (part := curve[first:end])
    ]
    assert found == expected


@pytest.mark.parametrize("text", ["", "3", "0,3,5", "0-7", "0-56:8", "0-3,8,16-24:4"])
def test_the_page_reads_ranks_as_python_does(text: str) -> None:
    assert run_script("groups.js", f"ranksOf({json.dumps(text)})") == list(ranks_of(text))


def test_a_table_is_csv_that_python_reads_back() -> None:
    rows = [["layer", "total (bytes)"], ['a "quoted", name', "12"], ["two\nlines", ""], ["plain", "0.5"]]
    text = run_script("copying.js", f"csvText({json.dumps(rows[0])}, {json.dumps(rows[1:])})")
    assert list(csv.reader(io.StringIO(str(text), newline=""))) == rows
