"""Sizes that follow the tokens of experts are found to the byte, and others are refused."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.recording import Recording
from fakedist.analysis.routed_blocks import Counts, calls_of, fitted_sizes
from fakedist.router_load import RouterLoad, RouterPass
from fakedist.rundir.rows import RouterPassRow, ScopeRow

Ints = npt.NDArray[np.int64]
ONE_LAYER = np.zeros(4, "i8")
COUNTS = np.array([[700, 300], [650, 310], [720, 290], [655, 333]])  # of each call: all, and one expert's


def blocks(*lines: tuple[str, Ints | list[int]]) -> tuple[pd.DataFrame, Ints]:
    """Blocks of lines that each call runs once, and the call of each block."""
    rows = [
        {"operation": operation, "stack": line, "phase": "forward", "recompute": False, "category": "temporary",
         "op": 10 * call + line, "requested_bytes": int(size), "call": call}
        for line, (operation, sizes) in enumerate(lines)
        for call, size in enumerate(sizes)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    return frame, frame.pop("call").to_numpy()


def test_sizes_follow_a_count_with_a_base_or_none() -> None:
    frame, call = blocks(
        ("mm", 2048 * COUNTS[:, 0]), ("cat", 16 + 4 * COUNTS[:, 1]), ("zeros", [512] * 4), ("mm", 64 * COUNTS[:1, 0])
    )
    base, per, follows, _ = fitted_sizes(frame, call, COUNTS, ONE_LAYER)
    assert list(zip(base[::4], per[::4], follows[::4], strict=True)) == [
        (0, 2048, 0),
        (16, 4, 1),
        (512, 0, -1),
        (64 * 700, 0, -1),  # one size says nothing, and no other line's blocks have it
    ]
    other = COUNTS[::-1]
    assert (base + per * np.where(follows < 0, 0, other[call, follows]))[:4].tolist() == (2048 * other[:, 0]).tolist()


def test_a_line_that_runs_once_follows_as_others_of_its_operation_do() -> None:
    frame, call = blocks(("mm", 2048 * COUNTS[:, 0]), ("mm", 2048 * COUNTS[:1, 0]))
    assert fitted_sizes(frame, call, COUNTS, ONE_LAYER)[2].tolist() == [0, 0, 0, 0, 0]


def test_sizes_that_vary_otherwise_are_bounded_by_the_largest() -> None:
    frame, call = blocks(("mm", 2048 * COUNTS[:, 0]), ("embedding", [4096, 8192, 2048, 4096]))
    fitted = fitted_sizes(frame, call, COUNTS, ONE_LAYER)
    assert fitted.bounded.tolist() == [4, 5, 6, 7]
    assert (fitted.base[4:].tolist(), fitted.follows[4:].tolist()) == ([8192] * 4, [-1] * 4)
    assert fitted.follows[:4].tolist() == [0] * 4
    kept = fitted_sizes(frame, call, COUNTS, ONE_LAYER, bounds=False)
    assert kept.base[4:].tolist() == [4096, 8192, 2048, 4096]


def test_sizes_that_nearly_follow_what_is_received_are_bounded_by_a_line() -> None:
    sizes = 800 * COUNTS[:, 0] + np.array([0, 300, 0, 512])
    frame, call = blocks(("sort", sizes))
    fitted = fitted_sizes(frame, call, COUNTS, ONE_LAYER)
    bound = fitted.base + fitted.per * COUNTS[:, 0]
    assert fitted.bounded.tolist() == [0, 1, 2, 3]
    assert fitted.follows.tolist() == [0] * 4
    assert bool(((bound >= sizes) & (bound < sizes + 1200)).all())


def test_two_sizes_fit_no_line_with_a_base() -> None:
    frame, call = blocks(("mm", 100 + 8 * COUNTS[:2, 0]))
    assert len(fitted_sizes(frame, call, COUNTS[:2], ONE_LAYER).bounded) == 2


def test_scratch_memory_follows_to_within_its_rounding_and_is_recorded_to_the_byte() -> None:
    keys = 8 * COUNTS[:, 0]
    scratch = 2 * -(-keys // 256) * 256 + 6655
    frame, call = blocks(("index_put", keys), ("index_put", scratch))
    base, per, follows, _ = fitted_sizes(frame, call, COUNTS, ONE_LAYER)
    assert (follows == 0).all()
    assert (base + per * COUNTS[call, 0]).tolist() == [*keys, *scratch]
    drawn = (base + per * 900)[4:]
    assert all(abs(size - (2 * 7424 + 6655)) < 1024 for size in drawn)
    frame, call = blocks(("index_put", keys), ("index_put", scratch + np.array([0, 0, 0, 3000])))
    assert fitted_sizes(frame, call, COUNTS, ONE_LAYER).bounded.tolist() == [4, 5, 6, 7]


def test_layers_whose_backwards_differ_are_told_apart() -> None:
    """The first has no gradient of its input, so the same turn is of a different product."""
    frame, call = blocks(("mm", [4096, 2048 * 650, 4096, 2048 * 655]), ("other", 512 * COUNTS[:, 0]))
    first, second = np.array([0, 1, 0, 1]), np.zeros(4, "i8")
    assert fitted_sizes(frame, call, COUNTS, first)[2].tolist()[:4] == [-1, 0, -1, 0]
    assert len(fitted_sizes(frame, call, COUNTS, second).bounded) == 4


def test_the_counts_of_a_rank_are_what_the_ranks_send_it() -> None:
    passes = [RouterPass(0, number, 0, 64, 8, 2) for number in range(3)]
    counts, load = Counts(passes, (4, 5)), RouterLoad("zipf:1", 2)
    sent = counts.sent(load)
    mine = counts.of_rank(sent, 1)
    assert sent.shape == (3, 2, 8)
    for row, of in zip(mine.tolist(), passes, strict=True):
        assert row[0] == load.received(of, (4, 5))[1]
        by_expert = load.counts(of, 4)[4:] + load.counts(of, 5)[4:]
        assert row[1:5] == by_expert.tolist()
        assert row[5:7] == [load.counts(of, rank)[4:].sum() for rank in (4, 5)]
        assert row[7:9] == [load.counts(of, 5)[:4].sum(), load.counts(of, 5)[4:].sum()]
        assert row[9] == sum(-(-count // 8) * 8 for count in by_expert.tolist())
        most = max(int(load.counts(of, rank).max()) for rank in (4, 5))
        rounded = [-(-count // 16) * 16 for count in (row[0], most)]
        assert [row[-11], row[-9], row[-4]] == [most, *rounded]


def test_a_backward_belongs_to_the_call_of_its_forward_whether_the_router_runs_again_or_not() -> None:
    """Operations 10 to 13 are the second layer again, with its router; 15 an activation of the first without."""
    first, second = (RouterPass(layer, 0, 0, 64, 8, 2) for layer in (0, 1))
    phases = [("forward", False), ("backward", True), ("backward", False)]
    made_by = {"op": np.array([10, 11, 12, 13, 14, 15, 16]), "forward": np.array([5, 5, 5, 5, 12, 4, 15])}
    recording = Recording(
        scopes=[ScopeRow(number, 1, phase, 0, again) for number, (phase, again) in enumerate(phases)],
        op_scope=np.array([0] * 10 + [1] * 4 + [2, 1, 2], "u4"),
        router_passes=[RouterPassRow(op, *of) for op, of in ((2, first), (6, second), (11, second))],
        made_by=made_by,
    )
    frame = pd.DataFrame({"op": [3, 7, 10, 13, 14, 15, 16]})
    assert calls_of(recording, frame, [first, second]).tolist() == [0, 1, 0, 1, 1, 0, 0]
