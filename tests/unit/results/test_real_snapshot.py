"""A memory snapshot of a real GPU, a training step of a course's GPT: every figure was counted in the file itself."""

from __future__ import annotations

import functools

import pytest

from fakedist.analysis.stack_lines import script_lines
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.rundir.rows import FrameRow
from tests.support.real_files import real_file

#: Line of the script: MiB at the peak, and blocks.
LINES = {
    "nn_utils.py:6 (softmax)": (6144.0, 24),
    "model.py:39 (forward)": (3236.1, 329),
    "model.py:434 (scaled_dot_product_attention)": (3128.0, 46),
    "model.py:532 (silu)": (1472.0, 46),
    "model.py:102 (forward)": (752.0, 47),
    "model.py:399 (forward)": (736.0, 23),
    "model.py:427 (scaled_dot_product_attention)": (384.0, 48),
}


@functools.cache
def opened() -> Run:
    return open_run(real_file("course-gpt-medium-1024.pickle"))


def test_the_peak_is_the_files_and_so_is_what_was_there_before_its_history() -> None:
    run = opened()
    events, blocks = run.table("events"), run.table("blocks")
    assert run.peak_allocated_bytes == 24_211_100_672
    before = blocks[blocks["operation"].astype(str) == "from before the history"]
    assert int(before["bytes"].sum()) == 5_099_827_200
    num_before = int(before["alloc_event"].max()) + 1
    assert len(events) - num_before == 22_331
    assert int(events["allocated_bytes"].to_numpy().argmax()) - num_before == 3_737


def test_lines_at_the_peak_hold_what_they_hold() -> None:
    run = opened()
    blocks, stacks = run.table("blocks"), run.table("stacks")
    frames = [FrameRow(*row) for row in run.table("frames").itertuples(index=False)]
    lines = [line.rpartition("/")[2] for line in script_lines(frames, stacks["frames"])]
    held = blocks[blocks["at_peak"]].assign(
        line=[lines[stack] if stack >= 0 else "" for stack in blocks["stack"][blocks["at_peak"]]]
    )
    sums = held.groupby("line")["bytes"].agg(["sum", "size"])
    for line, (mib, count) in LINES.items():
        assert (round(float(sums["sum"][line]) / 2**20, 1), int(sums["size"][line])) == (mib, count)
    backward = held[(held["line"] == "") & (held["phase"] == "backward")]["bytes"]
    assert (round(backward.sum() / 2**20, 1), len(backward)) == (1395.1, 14)


def test_phases_steps_and_layers_are_inferred() -> None:
    run = opened()
    assert run.table("spans")["phase"].astype(str).tolist() == ["init", "forward", "backward", "optimizer"]
    spans = run.table("spans").set_index("phase")["first_event"]
    peak = int(run.table("events")["allocated_bytes"].to_numpy().argmax())
    # The peak is near the begin of the backward.
    assert 0 < peak - spans["backward"] < 0.05 * (spans["optimizer"] - spans["backward"])
    assert [note.code for note in run.summary.notes] == ["snapshot_starts_late", "snapshot_inferred"]
    layers = run.layers()
    repeats = dict(zip(layers["name"], layers["num_repeats"], strict=True))
    assert repeats["nsys_profile:142.0-23"] == 24
    assert repeats["nsys_profile:142.0-23.model:382"] == 24


def test_categories_are_those_of_adamw_in_fp32() -> None:
    """Its two states are as large as the parameters, and it makes them anew in each step."""
    held = opened().summary.by_category
    assert held["parameter"] == pytest.approx(4 * 423_183_360, rel=0.002)
    assert held["optimizer_state"] == pytest.approx(2 * held["parameter"], rel=0.002)
    assert held["activation"] > 0.7 * opened().peak_allocated_bytes
