"""The layers and lines that account for a change, and the settings in which two runs differ."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.options import Job
from fakedist.results.compare.change_tables import with_change
from fakedist.results.compare.changed_memory import path_changes, reserved_changes, segment_changes
from fakedist.results.compare.changed_times import collective_changes, family_changes, part_changes
from fakedist.results.compare.layer_matching import OUTSIDE
from fakedist.results.compare.reasons import (
    AllocationSite,
    Cause,
    changed_arguments,
    changed_text,
    different_settings,
    find_cause,
    origin_of,
)
from fakedist.results.run import Run, RunTables
from fakedist.rundir.directory import Manifest
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.step_time import FamilyTime
from fakedist.rundir.summary import CollectiveTotal, ReservedMoment
from tests.unit.report.handmade import summary_of_nothing
from tests.unit.results.test_comparison import step


@pytest.mark.parametrize(
    ("rows", "cause"),
    [
        # path, name, category, change
        ([("a", "a", "x", 5), ("a", "a", "y", -5)], None),
        ([("l.*.up", "l.3.up", "x", 10), ("l.*.down", "l.3.down", "y", 2)], Cause(12, "x", "l.*.up", 10, "l.3.up")),
        ([("l.*.up", f"l.{at}.up", "x", -5) for at in (3, 4)], Cause(-10, "x", "l.*.up", -10, "l.*.up")),
        ([("l.*.up", "l.3.up", "x", -9), ("l.*.up", "l.4.up", "x", 0)], Cause(-9, "x", "l.*.up", -9, "l.3.up")),
        # A branch accounts for what is above it between four fifths and five quarters.
        ([("l.up", "", "x", 80), ("l.down", "", "x", 20)], Cause(100, "x", "l.up", 80, "l.up")),
        ([("l.up", "", "x", 79), ("l.down", "", "x", 21)], Cause(100, "x", "l", 100, "l")),
        ([("l.up", "", "x", 125), ("l.down", "", "x", -25)], Cause(100, "x", "l.up", 125, "l.up")),
        ([("l.up", "", "x", 126), ("l.down", "", "x", -26)], Cause(100, "x", "l", 100, "l")),
        ([("up", "", "x", 50), ("down", "", "x", 50)], Cause(100, "x", "", 100, "")),
        # Of categories the one that changed most in the same direction.
        ([("l", "", "x", -30), ("m", "", "y", 40), ("n", "", "z", 25)], Cause(35, "y", "m", 40, "m")),
        ([("l", "", "x", -30), ("m", "", "y", 20)], Cause(-10, "x", "l", -30, "l")),
        ([("(Net).(Softmax)", "", "x", 1)], Cause(1, "x", "(Net).(Softmax)", 1, "(Net).(Softmax)")),
    ],
)
def test_the_cause_is_the_deepest_layer_that_accounts_for_the_change(rows: list[Any], cause: Cause | None) -> None:
    parts = pd.DataFrame(rows, columns=["path", "name", "category", "change_bytes"])
    parts["name"] = parts["name"].where(parts["name"] != "", parts["path"])
    assert find_cause(parts) == cause


@pytest.mark.parametrize(
    ("blocks", "site"),
    [
        ([("l.up", "x", "train.py:1 (f)", 5), ("l.up", "x", "train.py:2 (f)", 6)], "train.py:2 (f)"),
        ([("l.up", "x", "train.py:1 (f)", 5), ("l.up", "x", "", 10)], "train.py:1 (f)"),
        ([("l.up", "x", "train.py:1 (f)", 5), ("l.up", "x", "", 11)], ""),
        ([("l.up.in", "x", "a.py:1 (f)", 1), ("l.upper", "x", "b.py:1 (f)", 9)], "a.py:1 (f)"),
        ([("l.up", "y", "a.py:1 (f)", 9), ("l.up", "x", "b.py:1 (f)", -9)], None),
    ],
)
@pytest.mark.parametrize("way", [1, -1])
def test_the_origin_is_a_line_unless_it_accounts_for_next_to_nothing(blocks: Any, site: str | None, way: int) -> None:
    table = pd.DataFrame(blocks, columns=["path", "category", "line", "change_bytes"])
    table = table.assign(operation="aten.mm.default", phase="backward", change_bytes=table["change_bytes"] * way)
    found = origin_of(Cause(1.0 * way, "x", "l.up", 1.0 * way, "l.up"), table)
    expected = AllocationSite(site) if site else AllocationSite("", "aten.mm.default", "backward")
    assert found == (AllocationSite() if site is None else expected)
    said = {None: "", "": ", made in mm.default (backward)"}.get(site, f", made at {site}")
    assert found.phrase("made") == said


def test_layers_in_words() -> None:
    causes = [Cause(1.0, "gemm", "", 1.0, name) for name in ("", OUTSIDE, "l.up")]
    assert [cause.phrase(is_time=True) for cause in causes] == [
        "gemm all over the model, +1.0 µs",
        "gemm outside of modules, +1.0 µs",
        "gemm of l.up, +1.0 µs",
    ]
    assert Cause(1.0, "other", "", -512, "l.up").phrase() == "other blocks of l.up, -512 B"
    assert Cause(1.0, "other", "", 512, "l.up").phrase(is_change=False) == "other blocks of l.up, 512 B"


@pytest.mark.parametrize("unit", ["bytes", "us"])
def test_a_change_has_its_amount_and_a_word(unit: Any) -> None:
    sides = pd.DataFrame([(0, 5), (5, 0), (5, 6), (6, 5), (5, 5), (0, 0)], columns=[f"a_{unit}", f"b_{unit}"])
    found = with_change(sides, unit)
    assert found[f"change_{unit}"].tolist() == [5, -5, 1, -1, 0, 0]
    assert found["what"].tolist() == ["appeared", "gone", "grew", "shrank", "same", "same"]
    close = with_change(pd.DataFrame({"a_us": [5.0, 5.0], "b_us": [5.049, 5.06]}), "us")
    assert close["what"].tolist() == ["same", "grew"]


def test_patterns_of_one_side_alone_count_whole() -> None:
    before = pd.DataFrame([("l.*", "x", 5), ("m", "x", 7)], columns=["path", "category", "bytes"])
    after = pd.DataFrame([("l.*", "x", 9), ("n", "x", 1)], columns=["path", "category", "bytes"])
    found = path_changes(before, after).set_index("name")["change_bytes"]
    assert found.to_dict() == {"l.*": 4, "m": -7, "n": 1}


def test_reserved_memory_and_segments_are_compared_part_by_part() -> None:
    moment = ReservedMoment("peak_reserved", 1, "forward", 90, 60, 0, {"pinned": 20, "waiting": 10}, 3, [], None)
    summary = summary_of_nothing()
    some = replace(summary, reserved=[moment])
    found = reserved_changes(summary, some)[["name", "a_bytes", "change_bytes"]].to_numpy().tolist()
    assert found == [["reserved", 0, 90], ["allocated", 0, 60], ["pinned", 0, 20], ["waiting", 0, 10]]
    columns = ["moment", "is_expandable", "private_pool", "pool", "bytes", "free_bytes"]
    a = [("peak_reserved", False, "", "large", 20, 5), ("peak_reserved", True, "", "large", 50, 0)]
    b = [("peak_reserved", False, "", "large", 20, 9), ("peak_reserved", True, "", "small", 70, 0)]
    b += [("peak_reserved", False, "1,0", "large", 20, 0), ("peak_allocated", False, "", "large", 20, 0)]
    changes = segment_changes(*(pd.DataFrame(rows, columns=columns) for rows in (a, b)))
    assert changes[["kind", "segment_bytes", "num_a", "num_b", "change_bytes", "what"]].to_numpy().tolist() == [
        ["expandable", 0, 1, 1, 20, "grew"],
        ["private", 20, 0, 1, 20, "appeared"],
        ["large", 20, 1, 1, 0, "other contents"],
    ]


def test_calls_are_compared_by_group_and_operation_and_equal_ones_left_out() -> None:
    def of(group: str, size: int, num_calls: int, num_bytes: int) -> CollectiveTotal:
        return CollectiveTotal(group, size, "all_reduce", num_calls, num_bytes, bytes_out=num_bytes)

    a = [
        of("dp", 8, 1, 10),
        of("dp", 8, 2, 10),
        of("tp", 2, 5, 7),
        of("pp", 4, 1, 9),
        of("ep", 4, 1, 3),
        of("cp", 2, 1, 1),
    ]
    b = [of("dp", 8, 3, 30), of("tp", 4, 5, 7), of("mp", 4, 1, 8), of("ep", 4, 2, 3), of("cp", 2, 1, 1)]
    found = collective_changes(a, b).set_index("group")
    assert found["what"].to_dict() == {"dp": "grew", "pp": "gone", "mp": "appeared", "ep": "same", "tp": "regrouped"}
    assert found["change_bytes"].tolist() == [20, -18, 16, 0, 0][: len(found)]
    assert found.loc["dp", ["a_num_calls", "b_num_calls", "a_bytes_in", "a_group_size"]].tolist() == [3, 3, 20, 8]


def test_families_that_only_one_step_knows_are_not_compared() -> None:
    def family(name: str, time_us: float, num_unknown: int = 0, num_kernels: int = 2) -> FamilyTime:
        known = dict.fromkeys(FamilyTime.__dataclass_fields__, 0)
        return FamilyTime(**{**known, "family": name, "num_kernels": num_kernels, "num_unknown": num_unknown,
                             "time_us": time_us})  # type: ignore[arg-type]  # fmt: skip

    a, b = step(), step()
    a.by_family[:] = [family("gemm", 10.0), family("norm", 3.0), family("copy", 5.0, 1), family("other", 1.0)]
    b.by_family[:] = [family("gemm", 14.0), family("norm", 3.0, 0, 3), family("copy", 9.0), family("optimizer", 2.0)]
    found = family_changes(a, b).set_index("family")
    assert found["what"].to_dict() == {"gemm": "grew", "optimizer": "appeared", "other": "gone", "norm": "recounted",
                                       "copy": "not known"}  # fmt: skip
    assert found["change_us"].to_dict() == {"gemm": 4, "optimizer": 2, "other": -1, "norm": 0, "copy": 0}
    parts = part_changes(a, replace(b, step_us=900.0, wait_us=7.0))
    assert parts[["name", "change_us"]].to_numpy().tolist() == [["step", -100.0], ["waits", 7.0]]


def manifest(**job: Any) -> Manifest:
    made = Job(**{"world_size": 8, "rank": 1, "target": "train.py"} | job)
    ended, where = Ending(Outcome.FINISHED, 0), {"versions": {}, "provenance": {}}
    return Manifest(command=[], cwd="", git_commit="", created="", job=made, exit=ended, notes=[], **where)


def test_settings_are_compared_in_words() -> None:
    summary = summary_of_nothing()
    a, b = manifest(), manifest(gpu_memory_bytes=80 << 30, environment=(("A", "1"), ("B", "2")), rank=2)
    killed = replace(summary, exit=Ending(Outcome.KILLED, 9, "by the system. More"), gpu="")
    run = Run(Path("a"), a, summary, RunTables(Path("a")))
    other = Run(Path("b"), replace(b, git_commit=f"{'0123456789' * 4}+"), killed, RunTables(Path("b")))
    assert different_settings(run, run) == {}
    assert different_settings(run, other) == {
        "rank": ("1", "2"),
        "GPU memory": ("", "80.00 GiB"),
        "variables": ("", "A=1 B=2"),
        "git commit": ("", "012345678901+"),
        "gpu": ("NVIDIA H100 80GB HBM3", ""),
        "how it ended": ("finished", "killed (by the system)"),
    }


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("--tp 8", "--tp 8 --loss-parallel", ["--loss-parallel"]),
        ("--tp 8 --lr -1", "--tp 4 --lr -1", ["--tp 8 -> 4"]),
        ("--tp=8", "--tp 8", []),
        ("--checkpoint full --tp 8", "--tp 8", ["no --checkpoint full"]),
        ("small.yaml --tp 8", "large.yaml --tp 8", ["small.yaml -> large.yaml"]),
        ("--set a=1 --set b=2", "--set a=1 --set b=3", ["--set a=1 b=2 -> a=1 b=3"]),
        ("--lr -0.5", "--lr -0.25", ["--lr -0.5 -> -0.25"]),
        ("--tp 8", "--tp", ["--tp 8 -> (none)"]),
    ],
)
def test_changed_arguments_are_named(a: str, b: str, told: list[str]) -> None:
    assert changed_arguments(a.split(), b.split()) == told


def test_of_many_changes_the_first_are_named() -> None:
    assert changed_text(["--a", "--b", "--c", "--d", "--e"]) == "--a, --b, --c and 2 more settings"
    assert changed_text(["--a", "--b", "--c", "--d"]) == "--a, --b, --c, --d"
    assert changed_text([]) == ""
