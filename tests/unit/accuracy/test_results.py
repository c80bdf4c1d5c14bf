"""The pages of docs/accuracy show all data, and what waits for a GPU, and take no rehearsal for a figure."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import JobError
from fakedist.extras.confirm.confirming import Confirmation
from fakedist.rundir.plain import to_plain
from tests.accuracy import results, tables
from tests.extras.confirm.test_confirming import KEPT, of_an_h200
from tests.gpu import confirm

HEAD = {"date": "2026-01-01", "gpu": "virtual", "torch": "2.15.0", "python": "3.11"}


def _row(rank: int, **differing: Any) -> dict[str, Any]:
    row = {
        "job": "fsdp2", "backend": "nccl", "num_ranks": 2, "rank": rank, "faked_on": "virtual",
        "real_allocated_bytes": 1000 + rank, "real_reserved_bytes": 2048, "allocated_difference_bytes": 0,
        "reserved_difference_bytes": 0, "phases_differing": 0, "num_phase_figures": 30, "num_events": 500,
        "first_other_event": -1, "cause": "",
    }  # fmt: skip
    return row | differing


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "DATA", tmp_path / "docs")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    return tmp_path / "docs"


def test_the_pages_are_made_of_the_data_that_is_there() -> None:
    marks = []
    for path in results.PAGES:
        page = path.read_text()
        assert results.with_tables(page) == page, "python -m tests.accuracy.results"
        marks += [mark for mark in re.findall(r"<!-- ([\w-]+) -->", page) if mark != "end"]
    assert sorted(marks) == sorted([*tables.TABLES, "on-a-gpu", "waiting-for-a-gpu", "confirmed"])


def test_ranks_of_a_job_are_one_line_with_the_largest_difference() -> None:
    rows = [_row(0), _row(1, reserved_difference_bytes=-4096, phases_differing=2, first_other_event=7, cause="why")]
    line = tables.many_processes({"head": HEAD, "rows": rows}).splitlines()[-1]
    assert line == "| fsdp2 | nccl | 2 | virtual | 1,001 | 2,048 | -4,096 | 2 of 60 | 1 ranks | why |"
    assert "none of 1,000" in tables.many_processes({"head": HEAD, "rows": [_row(0), _row(1)]})


def test_a_rank_faked_on_two_devices_has_a_line_for_each() -> None:
    rows = [_row(0, faked_on="cuda"), _row(0, faked_on="virtual", allocated_difference_bytes=512)]
    cells = [line.split(" | ") for line in tables.many_processes({"head": HEAD, "rows": rows}).splitlines()[-2:]]
    assert [(line[3], line[6]) for line in cells] == [("cuda", "+0"), ("virtual", "+512")]


def test_what_was_never_measured_is_called_empty(data: Path) -> None:
    page = "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in tables.TABLES)
    assert results.with_tables(page).count(results.EMPTY) == len(tables.TABLES)


def test_a_table_waits_for_a_gpu_until_there_are_data(data: Path) -> None:
    pages = "<!-- on-a-gpu -->\n<!-- end -->\n", "<!-- waiting-for-a-gpu -->\n<!-- end -->\n"
    empty, waiting = map(results.with_tables, pages)
    assert results.NOTHING in empty
    assert [line.count("make gpu PIECES=") for line in waiting.splitlines()[3:-1]] == [1] * len(tables.GPU_TABLES)
    results.write_result("gpu-outside", [{"after": "context", "used_bytes": 1 << 20, "reserved_bytes": 0}], gpu="H200")
    filled, waiting = map(results.with_tables, pages)
    assert "### Outside the allocator\n" in filled
    assert "| context | 1 MiB | +1 MiB |" in filled
    assert results.NOTHING not in filled
    assert "Outside the allocator" not in waiting
    assert waiting.count("make gpu PIECES=") == len(tables.GPU_TABLES) - 1


def test_each_table_that_waits_names_a_piece_that_measures_it() -> None:
    programs = [results.ROOT / "fakedist" / "extras" / "confirm" / "pieces.py"]
    programs += [results.ROOT / "tests" / "gpu" / f"{name}.py" for name in ("confirm", "host")]
    pieces = "".join(path.read_text() for path in programs)
    for name, each in tables.GPU_TABLES.items():
        assert each.piece in confirm.PIECES
        assert f'session.write("{name}"' in pieces


def test_rows_of_a_job_that_was_measured_again_take_the_place_of_the_old_ones(data: Path) -> None:
    match = results.same_job(("job", "num_ranks"))
    first = [_row(0), _row(1), _row(0, num_ranks=4), _row(0, job="ddp")]
    results.write_result("many-processes-virtual", first, instead_of=match)
    again = [_row(0, num_ranks=8), _row(0, num_ranks=2, num_events=7)]
    path = results.write_result("many-processes-virtual", again, instead_of=match)
    rows = json.loads(path.read_text())["rows"]
    found = [(row["job"], row["num_ranks"], row["num_events"]) for row in rows]
    assert found == [("fsdp2", 2, 7), ("fsdp2", 4, 500), ("ddp", 2, 500), ("fsdp2", 8, 500)]


def test_rows_of_two_versions_of_torch_are_not_mixed(data: Path) -> None:
    match = results.same_job(("job",))
    results.write_result("many-processes-virtual", [_row(0)], instead_of=match, torch="2.11.0")
    with pytest.raises(results.NotMeasuredError, match=r"of torch 2\.11\.0"):
        results.write_result("many-processes-virtual", [_row(0)], instead_of=match, torch="2.15.0")


def measured_file(out: Path, made: Confirmation) -> Path:
    out.mkdir(exist_ok=True)
    (out / results.RESULTS).write_text(json.dumps(to_plain(made)))
    return out


def test_what_a_gpu_measured_is_kept_though_a_piece_is_missing(data: Path, tmp_path: Path) -> None:
    made = of_an_h200(**{"gpu-outside": {"head": {"gpu": "NVIDIA H200"}, "rows": []}})
    made.pieces.clear()
    kept = results.keep(measured_file(tmp_path / "out", made))
    assert json.loads((data / "gpu-outside.json").read_text()) == made.tables["gpu-outside"]
    recording = tmp_path / "tests" / "data" / "gpu" / "nvidia-h200-torch2.11.0" / "real-bare.jsonl.gz"
    assert recording.read_bytes() == KEPT.read_bytes()
    assert kept == [data / "gpu-recordings.json", data / "gpu-outside.json", recording]


def test_what_contradicts_itself_or_is_no_table_is_not_kept(data: Path, tmp_path: Path) -> None:
    made = of_an_h200()
    made.tables["gpu-recordings"]["rows"][0]["num_events"] += 1
    with pytest.raises(results.NotMeasuredError, match="the table has num_events"):
        results.keep(measured_file(tmp_path / "out", made))
    made.tables["gpu-other"] = {"head": {}, "rows": []}
    with pytest.raises(results.NotMeasuredError, match="there is no table gpu-other"):
        results.keep(measured_file(tmp_path / "out", made))
    with pytest.raises(JobError, match="cannot be read"):
        results.keep(tmp_path)
    assert not list(data.iterdir())


def test_a_rehearsal_is_refused_by_its_file_and_by_each_table(data: Path, tmp_path: Path) -> None:
    made = replace(of_an_h200(), is_rehearsal=True)
    with pytest.raises(results.NotMeasuredError, match="stood in for a real one"):
        results.keep(measured_file(tmp_path / "out", made))
    made = of_an_h200(**{"gpu-outside": {"head": {"rehearsal": True}, "rows": []}})
    with pytest.raises(results.NotMeasuredError, match="is a rehearsal"):
        results.keep(measured_file(tmp_path / "out", made))
    assert not list(data.iterdir())
    results.write_result("gpu-outside", [], rehearsal=True)
    with pytest.raises(results.NotMeasuredError, match="is a rehearsal"):
        results.with_tables("<!-- on-a-gpu -->\n<!-- end -->\n")


def test_no_rehearsal_lies_in_docs() -> None:
    found = [path for path in results.DATA.glob("*.json") if path.stem in (*tables.TABLES, *tables.GPU_TABLES)]
    assert found
    assert not [path for path in found if results.measured(path)["head"].get("rehearsal")]


def test_where_a_job_fails_is_told_once_where_both_fail_alike() -> None:
    failed = {"step": 2, "phase": "backward", "num_allocations": 1200, "requested_bytes": 512, "peak_reserved_bytes": 1}
    fits = failed | {"phase": "", "requested_bytes": 0}
    rows = [
        {"limit": "device", "gib": 3, "real": failed, "virtual": failed},
        {"limit": "device", "gib": 2, "real": failed, "virtual": fits},
    ]
    lines = tables.out_of_memory({"head": HEAD, "rows": rows}).splitlines()[-2:]
    assert lines[0] == "| device | 3 GiB | step 2, backward, allocation 1,200: 512 bytes | the same | +0 |"
    assert lines[1].endswith("| fits, 1,200 allocations | +0 |")


def test_a_job_that_differs_shows_how_and_one_that_does_not_shows_none() -> None:
    row = {
        "job": "lstm", "num_events": 5, "allocated_bytes": 100, "reserved_bytes": 300, "virtual_verdict": "events",
        "virtual_reason": "event 4: real alloc 8 | more", "virtual_allocated_difference_bytes": 0,
        "virtual_reserved_difference_bytes": 0, "recorded_verdict": "same",
    }  # fmt: skip
    line = tables.recordings({"head": HEAD, "rows": [row]}).splitlines()[-1]
    assert line == "| lstm | 5 | 100 | 300 | 200 | equal peaks; event 4: real alloc 8 / more | same |"


def test_memory_outside_the_allocator_is_told_with_what_each_thing_adds() -> None:
    rows = [
        {"after": "context", "used_bytes": 500 << 20, "reserved_bytes": 0},
        {"after": "cuBLAS", "used_bytes": 540 << 20, "reserved_bytes": 20 << 20},
    ]
    text = tables.outside({"head": HEAD | {"failed": ["NCCL: no"]}, "rows": rows})
    assert text.splitlines()[-3:] == ["| cuBLAS | 520 MiB | +20 MiB |", "", "Not in the table: NCCL: no."]


def test_a_confirmation_gets_its_line_and_a_new_one_of_the_same_gpu_replaces_it(data: Path, tmp_path: Path) -> None:
    made = of_an_h200()
    for row in made.tables["gpu-recordings"]["rows"]:
        row |= {"virtual_verdict": "order", "virtual_allocated_difference_bytes": 0}
        row["virtual_reserved_difference_bytes"] = 512 * (row["job"] == "lstm")
    made.tables["gpu-recordings"]["head"]["date"] = "2026-12-01"
    estimates = [
        {"job": "fp8", "what": "total", "measured_us": 100.0, "estimated_us": us} for us in (90.0, 104.0, 140.0)
    ]
    made.tables["gpu-estimates"] = {"head": {}, "rows": estimates}
    made.tables["gpu-outside"] = {"head": {}, "rows": [{"used_bytes": 600 << 20, "reserved_bytes": 100 << 20}]}
    (tmp_path / "sent.json").write_text(json.dumps(to_plain(made)))
    assert results.confirmed(tmp_path / "sent.json") == results.confirmed(tmp_path / "sent.json")
    *_, line = results.with_tables("<!-- confirmed -->\n<!-- end -->").splitlines()[:-1]
    assert line == (
        "| NVIDIA H200 | 580.1 | 2.11.0+cu130 | 2026-12-01 | 35 of 36 | 36 of 36 | +4% (-10% to +40%) | 524,288,000 |"
    )
    made.tables["gpu-recordings"]["rows"][0]["num_events"] += 1
    (tmp_path / "sent.json").write_text(json.dumps(to_plain(made)))
    with pytest.raises(results.NotMeasuredError, match="the table has num_events"):
        results.confirmed(tmp_path / "sent.json")
