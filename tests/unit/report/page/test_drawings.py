"""The page's drawings, unpacked as the page unpacks them, against the tables.

The page's switches: what Python packs of the advised changes, and the browser's replay against Python's.
"""

from __future__ import annotations

import base64
import gzip
import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakedist.analysis.evidence import Change, Evidence, Price, Saving
from fakedist.report.content.report_blocks import Changes
from fakedist.report.content.run import run_report
from fakedist.report.figures.memory_figures import read_curve
from fakedist.report.page import drawings
from fakedist.report.page.drawings import (
    Pack,
    add_refusal,
    add_reserved,
    add_spans,
    add_switches,
    add_timeline,
    add_times,
    find_switches,
)
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.summary import Advice, Remedy
from tests.unit.analysis.recorded import GIB, GPU, KIB, MIB, HandMade
from tests.unit.report import handmade
from tests.unit.report.handmade import built, ended_well, timed


def unpacked(text: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    block = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(block[:4], "little")
    header = json.loads(block[4 : 4 + length])
    found = {}
    for name, (kind, at, count) in header["arrays"].items():
        width = int(kind[1])
        data = np.frombuffer(block, "u1", count * width, 4 + length + at)
        if kind[0] == "u":
            data = data.reshape(width, count).T
        found[name] = np.ascontiguousarray(data).view(f"<{kind}").ravel().tolist()
    return header["meta"], found


@pytest.mark.parametrize("values", [[], [0, 255], [256, 1], [1 << 16, 3], [1 << 40, 5], [0.5, -1.0]])
def test_numbers_come_back(values: list[float]) -> None:
    pack = Pack()
    pack.meta["x"] = "<&>\u2028"
    pack.add("before", [1, 2, 3])
    pack.add("values", np.array(values))
    meta, found = unpacked(pack.text())
    assert meta == {"x": "<&>\u2028"}
    assert found == {"before": [1, 2, 3], "values": values}


def test_the_timeline_is_the_allocators_own_curve(tmp_path: Path) -> None:
    run = open_run(handmade.ended_well(tmp_path / "run"))
    pack = Pack()
    curve = read_curve(run)
    add_timeline(pack, run, curve)
    add_reserved(pack, curve)
    add_spans(pack, run, curve)
    meta, found = unpacked(pack.text())
    change, at = [0.0] * meta["num_moves"], 0
    freed = set()
    for kind, life in zip(found["block_kind"], found["block_life"], strict=True):
        while at in freed:
            at += 1
        change[at] += found["kind_bytes"][int(kind)]
        if life:
            change[at + int(life)] -= found["kind_bytes"][int(kind)]
            freed.add(at + int(life))
        at += 1
    events = run.table("events")
    curve = events[events["action"].isin(("alloc", "free_requested"))]["allocated_bytes"]
    assert np.cumsum(change).tolist() == curve.tolist()
    assert found["reserved_bytes"] == [1 << 30]
    phases = [meta["phases"][int(phase)] for phase in found["span_phase"][:4]]
    assert phases == ["init", "forward", "backward", "optimizer"]
    assert found["span_step"][:4] == [0, 1, 1, 1]
    assert found["span_move"][:2] == [0, 4]


def test_reserved_memory_changes_at_the_move_that_needed_it(tmp_path: Path) -> None:
    made = HandMade()
    made.op("forward", 1)
    made.alloc(0, MIB)  # move 0, in the first segment
    made.alloc(MIB, MIB)  # move 1
    made.event("segment_alloc", 2 * GIB, GIB)
    made.alloc(2 * GIB, GIB)  # move 2, in the second
    made.free(2 * GIB, GIB)  # move 3
    made.event("segment_free", 2 * GIB, GIB)
    made.alloc(2 * MIB, MIB)  # move 4
    made.ended()
    directory = built(made, tmp_path / "run")
    run = open_run(directory)
    pack = Pack()
    add_reserved(pack, read_curve(run))
    _, found = unpacked(pack.text())
    assert found["reserved_move"] == [0, 2, 4]
    assert found["reserved_bytes"] == [GIB, 2 * GIB, GIB]


def test_the_axes_of_time_are_those_of_the_recording_and_of_the_timed_step(tmp_path: Path) -> None:
    run = open_run(handmade.timed(tmp_path / "run"))
    curve, pack = read_curve(run), Pack()
    add_times(pack, run, curve)
    meta, found = unpacked(pack.text())
    events = run.table("events")
    moved = events[events["action"].isin(("alloc", "free_requested"))]["time_us"]
    assert found["wall_move"] == list(range(curve.num_moves))
    assert found["wall_us"] == (moved - moved.iloc[0]).tolist()
    if "step_us" in found:
        assert found["step_us"] == sorted(found["step_us"])
        assert meta["timed"] == {"step": 3, "source": "estimated"}


def test_the_refusal_is_the_move_that_did_not_fit(tmp_path: Path) -> None:
    run, pack = open_run(handmade.out_of_memory(tmp_path / "full")), Pack()
    curve = read_curve(run)
    assert add_refusal(pack, run, curve) == "the refusal"
    assert pack.meta["refusal"] == {"move": curve.num_moves - 1, "text": "refused: 90.00 GiB for addmm.default"}
    run, pack = open_run(handmade.ended_well(tmp_path / "well")), Pack()
    assert add_refusal(pack, run, read_curve(run)) == ""
    assert "refusal" not in pack.meta


NODE = shutil.which("node")
REPLAYED = Path(__file__).parents[3] / "page" / "replayed.js"
CAPACITY = 2 * GIB  # little: advice gives at least 1 % of it


def trained(directory: Path, layers: int = 4) -> Path:
    """A step of layers that save blocks, whose optimizer state is worth nothing to advise; segments in between."""
    made = HandMade(gpu=replace(GPU, capacity_bytes=CAPACITY))
    container = made.layer("layers", "ModuleList", made.layer("(Net)", "Net"))
    repeats = [made.layer(f"layers.{at}", "Block", container) for at in range(layers)]
    stack = made.stack(("/site-packages/torch/nn/linear.py", 5, "forward"), ("/job/model.py", 12, "forward"))
    ops = []
    for number, layer in enumerate(repeats):
        for at in range(3):
            ops.append(made.op("forward", 1, layer))
            made.alloc((number * 10 + at) * 10 * MIB, 10 * MIB, stack=stack)
        made.event("segment_alloc", (2 + number) * GIB, 2 * MIB)
    made.op("forward", 1, name="aten._log_softmax.default")
    made.alloc(900 * MIB, 40 * MIB)
    made.op("backward", 1, 0)
    made.region(ops[0], ops[-1])
    made.alloc(1_000 * MIB, 2 * MIB)
    made.free(900 * MIB, 40 * MIB)
    for number in reversed(range(layers)):
        for at in reversed(range(3)):
            made.free((number * 10 + at) * 10 * MIB, 10 * MIB)
    made.step(1)
    made.ended()
    return built(made, directory)


def at_random(directory: Path, seed: int) -> Path:
    """Blocks of random sizes and lifetimes, with other events between."""
    choose = random.Random(seed)
    made = HandMade()
    made.op("forward", 1)
    alive: list[tuple[int, int]] = []
    for number in range(120):
        if choose.random() < 0.15:
            made.event("segment_alloc", (2 + number) * GIB, 2 * MIB)
        if alive and choose.random() < 0.45:
            made.free(*alive.pop(choose.randrange(len(alive))))
        else:
            alive.append((number * 8 * MIB, choose.randint(1, 4 * KIB) * KIB))
            made.alloc(*alive[-1])
    made.ended()
    return built(made, directory)


def random_changes(evidence: Evidence, seed: int) -> Iterator[Change]:
    """Changes of every form: all of a life or a part of it, one end or two, more bytes, parts that end too early."""
    choose = np.random.default_rng(seed)
    num, last = len(evidence.blocks), len(evidence.allocated)
    size = evidence.blocks["bytes"].to_numpy()
    made, freed = (evidence.blocks[name].to_numpy() for name in ("alloc_event", "free_event"))

    def saving(is_part: bool) -> Saving:
        gone = np.where(choose.random(num) < 0.5, size * (1 - 1 / choose.integers(2, 9)), 0.0)
        if not is_part:
            return Saving(gone)
        gone = np.where(choose.random(num) < 0.05, -gone, gone)
        starts = np.minimum(made + choose.integers(0, 6, num), last)
        return Saving(gone, starts, np.maximum(np.minimum(freed - choose.integers(0, 6, num), last), 0))

    for number in range(5):
        yield Change(
            "random",
            f"change {number}",
            "",
            saving(number % 2 == 1),
            saving(number % 2 == 1) if number > 2 else None,
            subjects=frozenset({f"subject {number % 4}"}),
            price=None if number == 2 else Price(100.5 * number, 150.5 * number, "work"),
            has_other_blocks=number == 4,
        )


def packed(run: Run) -> tuple[Pack, list[drawings.Switch]]:
    pack, curve = Pack(), read_curve(run)
    add_timeline(pack, run, curve)
    add_reserved(pack, curve)
    add_spans(pack, run, curve)
    return pack, add_switches(pack, run, curve)


def replayed(run: Run, folder: Path) -> list[dict[str, Any]]:
    """The outcome of every combination of the run's switches, by the browser's replay."""
    (folder / "numbers.txt").write_text(packed(run)[0].text())
    command = [str(NODE), str(REPLAYED), str(folder / "numbers.txt")]
    return list(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout))


def differing(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Combinations of which the browser's peak, curve, need, verdict or price is not Python's."""
    evidence, found = find_switches(run)
    assert evidence is not None
    room = drawings.room_of_run(run)
    told = replayed(run, folder)
    assert len(told) == 2 ** len(found)
    wrong = []
    for row in told:
        chosen = [found[number] for number in row["on"]]
        gives = evidence.saved([switch.change for switch in chosen if switch.change is not None])
        low, high = evidence.needed_without(*gives)
        priced = [switch.advice for switch in chosen if switch.advice.price_us is not None]
        prices = [(advice.price_us or 0.0, advice.price_high_us or 0.0) for advice in priced]
        rounding = evidence.rounding if len(row["ends"]) > 1 else 0
        others = any(switch.change is not None and switch.change.has_other_blocks for switch in chosen)
        ends = [evidence.peak - gives[1] + rounding, evidence.peak - gives[0] - rounding * others]
        for end, bytes_ in zip(row["ends"], ends[: len(row["ends"])], strict=True):
            # Sums by category are of fractions, in another order.
            assert end == {"bytes": bytes_, "curve": bytes_, "held": pytest.approx(bytes_, abs=2)}
        expected = {
            "low": low,
            "high": high,
            "fits": room.fits(low, high),
            "priceUs": [sum(own) for own in zip(*prices, strict=True)] if prices else None,
            "unpriced": [switch.advice.rule for switch in chosen if switch.advice.price_us is None],
        }
        if {name: row[name] for name in expected} != expected:
            wrong.append(row)
    return wrong


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_browser_replays_advised_changes_to_the_byte(tmp_path: Path) -> None:
    run = open_run(trained(tmp_path / "run"))
    titles = [advice.title for advice in run.summary.advice]
    assert {
        "checkpoint layers.0-3 (Block)",
        "compute the loss in 8 chunks, for the most with the output layer in the chunks",
    } <= set(titles)
    assert differing(run, tmp_path) == []


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("seed", range(4))
def test_the_browser_replays_any_changes_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    run = open_run(at_random(tmp_path / "run", seed))
    monkeypatch.setattr(drawings, "RULES", (lambda evidence: random_changes(evidence, seed),))
    monkeypatch.setattr(Evidence, "rounding", KIB)  # these blocks are as large as was asked for
    prices = [None if number == 1 else number / 3 for number in range(5)]
    advised = [
        Advice("random", f"change {number}", "", 0, price_us=price, price_high_us=number)
        for number, price in enumerate(prices)
    ]
    run = Run(run.path, run.manifest, replace(run.summary, advice=advised), run._tables)
    assert differing(run, tmp_path) == []


def test_a_switch_has_the_price_and_the_rivals_of_its_change(tmp_path: Path) -> None:
    run = open_run(trained(tmp_path / "run"))
    every_second = "checkpoint every second layer of layers.0-3 (Block)"
    remedy = Remedy(["checkpoint"], [every_second], 0, 0, 0, "", 0.0, None, [])
    run = Run(run.path, run.manifest, replace(run.summary, remedy=remedy), run._tables)
    pack, found = packed(run)
    described = {row["title"]: row for row in pack.meta["switches"]}  # type: ignore[attr-defined]
    checkpoints = [row for title, row in described.items() if title.startswith("checkpoint")]
    assert len(checkpoints) == 2
    assert len({tuple(row["subjects"]) for row in checkpoints}) == 1
    (changes,) = (block for block in run_report(run).page_blocks if isinstance(block, Changes) and block.has_switches)
    rows = {item.title: item for item in changes.items}
    assert rows[every_second].gives == "40.00 MiB"  # two layers drop two blocks each
    assert [found[item.switch].advice.title for item in changes.items] == list(rows)


@pytest.mark.parametrize("make", [ended_well, timed])
def test_a_run_without_advice_has_no_switches(tmp_path: Path, make: Any) -> None:
    run = open_run(make(tmp_path / "run"))
    run = Run(run.path, run.manifest, replace(run.summary, advice=[], remedy=None), run._tables)
    pack, found = packed(run)
    assert found == []
    assert "switches" not in pack.meta
