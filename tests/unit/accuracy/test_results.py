"""docs/accuracy.md shows the data in docs/accuracy, and says where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accuracy import results


def _row(rank: int, **differing: Any) -> dict[str, Any]:
    row = {
        "job": "fsdp2", "backend": "nccl", "num_ranks": 2, "rank": rank, "real_allocated_bytes": 1000 + rank,
        "real_reserved_bytes": 2048, "allocated_difference_bytes": 0, "reserved_difference_bytes": 0,
        "phases_differing": 0, "num_phase_figures": 30, "num_events": 500, "first_other_event": -1, "cause": "",
    }  # fmt: skip
    return row | differing


def test_the_page_is_made_of_the_data_that_is_there() -> None:
    page = results.PAGE.read_text()
    assert results.with_tables(page) == page, "python -m tests.accuracy.results"


def test_ranks_of_a_job_are_one_line_with_the_largest_difference() -> None:
    head = {"date": "2026-01-01", "gpu": "virtual", "torch": "2.15.0", "python": "3.11"}
    rows = [_row(0), _row(1, reserved_difference_bytes=-4096, phases_differing=2, first_other_event=7, cause="why")]
    line = results.many_processes({"head": head, "rows": rows}).splitlines()[-1]
    assert line == "| fsdp2 | nccl | 2 | 1,001 | 2,048 | -4,096 | 2 of 60 | 1 ranks | why |"
    assert "none of 1,000" in results.many_processes({"head": head, "rows": [_row(0), _row(1)]})


def test_what_was_never_measured_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "DATA", tmp_path)
    page = "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in results.TABLES)
    assert results.with_tables(page).count("*Empty: never measured.*") == len(results.TABLES)
