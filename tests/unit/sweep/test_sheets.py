from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from fakedist.options import JobProgram
from fakedist.report.render.html import report_page
from fakedist.report.render.markdown import report_markdown
from fakedist.report.render.terminal import render
from fakedist.sweep.charts import maps, memory_against_speed, parallel_axes
from fakedist.sweep.command import Texts
from fakedist.sweep.plan import CommandLineSettings, sweep_of_command
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.ranking import answer, counts_text, row_text, short_label
from fakedist.sweep.sheets import dry_run, render_dry_run, sweep_report
from fakedist.sweep.space import COLUMNS
from fakedist.sweep.sweep_directory import About, Sweep
from tests.unit.sweep.rows_by_hand import row


def sweep(*rows: Row, path: Path = Path("/sweep")) -> Sweep:
    axes = {name: sorted({dict(each.values)[name] for each in rows}, key=str) for name, _ in rows[0].values}
    about = About(
        command=[], program="train.py", axes=axes, ranks="ends", headroom=0.05, points=[each.id for each in rows]
    )
    return Sweep(path, about, rows)


ROWS = (
    row(1702, 68.1, tp=2, recompute="moe_act"),
    row(1700, 60, tp=4, recompute="moe_act"),
    row(900, 79, tp=1, recompute="full"),
    row(tp=3, recompute="full", status=Status.INVALID),
    row(tp=3, recompute="moe_act", status=Status.INVALID),
)


def test_a_point_that_fits_without_a_step_has_its_reason() -> None:
    without = replace(row(None, tp=2), why_no_step="rank 0: none of its 2 micro-batches is steady")
    assert row_text(without) == "tp=2: fits, its step is not known: rank 0: none of its 2 micro-batches is steady"


def test_the_answer_names_the_fastest_point_and_what_is_as_fast() -> None:
    first, second, third = answer(sweep(*ROWS).ranking)
    assert first == (
        "fastest that fits with 5% headroom: tp2 recompute=moe_act, 1,702 tokens/s per GPU, 68.1 of 80.0 GiB"
    )
    assert second == "statistically tied with it: tp4 recompute=moe_act (within each other's 90 % intervals)"
    assert third == "not ranked, because less than 5% headroom is left: 1 point"
    assert counts_text(sweep(*ROWS).ranking) == "5 points: 3 fit, 2 invalid layout"


def test_no_point_that_fits_is_said() -> None:
    assert list(answer(sweep(ROWS[3]).ranking)) == ["no point fits with 5% headroom and has a step"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"tp": 2, "pp": 8}, "tp2 pp8"),
        ({"x1": 2}, "x1=2"),
        ({"on": True}, "on=true"),
        ({"r": "a b"}, "r=a b"),
        ({}, "the only point"),
    ],
)
def test_a_point_has_a_short_label(values: dict[str, bool | int | str], text: str) -> None:
    assert short_label(tuple(values.items())) == text


def shown(found: Sweep) -> str:
    text = StringIO()
    render(sweep_report(found), Console(file=text, width=160))
    return text.getvalue()


def test_of_many_points_the_fastest_are_shown_and_a_place_of_its_own_is_no_tie() -> None:
    rows = [row(100 * 1.1**number, tp=number) for number in range(22)]
    text = shown(sweep(*rows))
    assert "2 more are in sweep.parquet, on the page and in --json" in text
    assert re.findall(r"^ *(\d+[=*]*)  ", text, re.MULTILINE) == ["1*", *map(str, range(2, 21))]
    assert "more are in" not in shown(sweep(*rows[:20]))


def test_the_terminal_shows_points_axes_and_why_layouts_are_invalid() -> None:
    lines = shown(sweep(*ROWS)).splitlines()
    (first,) = [line for line in lines if "1=" in line and "moe_act" in line and " 2 " in line]
    assert "68.10 GiB" in first
    assert any("2 x invalid layout: AssertionError: no at /job/train.py:7 (main) (first tp=3" in line for line in lines)
    assert any(line.startswith(("recompute", "tp")) for line in lines)


def test_json_has_every_point_and_the_ranking() -> None:
    found = json.loads(json.dumps(sweep_report(sweep(*ROWS)).data()))
    assert found["best"] == ROWS[0].id
    assert found["statistically_tied"] == [ROWS[1].id]
    assert [each["place"] for each in found["ranking"]] == [1, 1]
    assert len(found["points"]) == 5
    assert found["points"][3]["status"] == "invalid layout"
    assert found["points"][0]["values"] == {"tp": 2, "recompute": "moe_act"}


def test_the_frame_has_a_row_for_each_point() -> None:
    frame = sweep(*ROWS).frame()
    assert list(frame.columns) == ["tp", "recompute", *COLUMNS]
    assert list(frame["status"]) == [str(each.status) for each in ROWS]
    assert frame["total_bytes"][0] == ROWS[0].ranks[0].total_bytes
    assert frame["headroom_bytes"][0] == ROWS[0].headroom_bytes
    assert frame["place"].tolist()[:2] == [1, 1]
    assert pd.isna(frame["place"][3])
    assert frame["step_low_us"][0] < frame["step_us"][0] < frame["step_high_us"][0]


def test_the_table_is_read_back(tmp_path: Path) -> None:
    made = sweep(*ROWS, row(10, tp="all", recompute="full"), path=tmp_path)
    found = pd.read_parquet(made.write_table())
    assert list(found["tp"]) == ["2", "4", "1", "3", "3", "all"]  # one type for one column
    assert json.loads(found["stages"][0])[0]["rank"] == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "sweep.parquet"]


REFERENCE = Path(__file__).parent / "reference_sweeps.json"


def planned(trials: int | None) -> str:
    given = CommandLineSettings(
        ["tp=1,2", "pp=1,2,4"],
        conditions=["tp * pp < 8"],
        prices=["gpus-per-node={tp}"],
        options={"world_size": Texts(("8",))},
        settings={"trials": trials},
    )
    text = StringIO()
    plan = sweep_of_command(JobProgram("train.py", ("--pp={pp}",)), given)
    render_dry_run(dry_run(plan), Path("/sweep"), Console(file=text, width=160))
    return text.getvalue()


def said() -> dict[str, object]:
    """All that is shown of some sweeps."""
    many = [row(speed, 30 + 4 * number, tp=2 ** (number % 3), pp=number // 3, mbs=1 + number % 2)
            for number, speed in enumerate((900, 1200, 1190, 700, 80, 1310, 1300, 1210.5, 400, 99.96))]  # fmt: skip
    many += [row(tp=tp, pp=4, mbs=1, status=status) for tp, status in zip((1, 2, 4, 8), list(Status)[1:], strict=False)]
    bare = [one if one.status.ran else dataclasses.replace(one, ranks=()) for one in many]
    formula = [dataclasses.replace(one, step=one.step and dataclasses.replace(one.step, bubble_from="not known"))
               for one in many]  # fmt: skip
    odd = [*many[:3], row(None, tp=16, pp=1, mbs=1), row(None, 79, tp=32, pp=1, mbs=1)]
    odd[0] = dataclasses.replace(odd[0], step=odd[0].step and dataclasses.replace(odd[0].step, low_us=None, mfu=0.41))
    found: dict[str, object] = {"dry runs": list(map(planned, (None, 3)))}
    cases = {"few": ROWS, "many": many, "bare": bare, "formula": formula, "none": many[-3:], "odd": odd}
    for name, rows in cases.items():
        made = sweep(*rows)
        report = sweep_report(made)
        page = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", report_page(report), flags=re.DOTALL)  # its words
        found |= {f"{name} text": shown(made), f"{name} rows": [row_text(one) for one in rows]}
        found[f"{name} page"] = page.split()
        if name in ("bare", "formula"):
            continue
        found |= {f"{name} object": json.loads(json.dumps(report.data()))}
        found |= {
            f"{name} frame": json.loads(made.frame().to_json()),
            f"{name} markdown": report_markdown(sweep_report(made)),
        }
        if made.ranking.speeds:
            figures = {"memory": memory_against_speed(made), "axes": parallel_axes(made), **maps(made)}
            for kind, figure in figures.items():
                found[f"{name} {kind}"] = json.loads(figure.to_json())["data"]
    return found


def test_sweeps_are_shown_as_they_were() -> None:
    """A word that changes changes ``reference_sweeps.json``, which ``python -m`` of this module writes."""
    expected, now = json.loads(REFERENCE.read_text()), said()
    assert {name: value for name, value in now.items() if expected.get(name) != value} == {}
    assert list(now) == list(expected)


if __name__ == "__main__":
    REFERENCE.write_text(json.dumps(said(), indent=0) + "\n")
