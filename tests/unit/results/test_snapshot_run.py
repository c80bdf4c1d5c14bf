import json
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.report.page.run_page import page
from fakedist.results.opening import open_run
from tests.unit.report.handmade import ended_well
from tests.unit.report.reading import read_page


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    return ended_well(tmp_path / "run") / "memory_snapshot.pickle"


def test_a_snapshot_has_the_peaks_of_its_run(snapshot: Path) -> None:
    found, run = open_run(snapshot), open_run(snapshot.parent)
    assert found.summary.peak_allocated_bytes == run.summary.peak_allocated_bytes
    assert found.summary.peak_reserved_bytes == run.summary.peak_reserved_bytes
    columns = ["bytes", "alloc_event", "free_event", "at_peak"]
    assert found.table("blocks")[columns].equals(run.table("blocks")[columns])


def test_it_is_shown_in_every_format(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for form, wanted in (("text", "202.49 MiB"), ("markdown", "202.49 MiB allocated"), ("csv", "name,")):
        assert main(["report", str(snapshot), "--format", form]) == 0
        assert wanted in capsys.readouterr().out
    assert main(["report", str(snapshot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["peak_phase"], found["by_phase"], found["layers"], found["rank"]) == ("", [], [], None)


def test_its_page_has_the_memory_half_and_no_word_of_the_rest(snapshot: Path) -> None:
    found = read_page(page(open_run(snapshot)))
    assert found.figures["peak_allocated"] == "202.49 MiB"
    assert set(found.tables) >= {"lines", "blocks"}
    assert not {"layer-table", "calls", "phases", "categories"} & set(found.tables)
    assert found.tables["lines"][1][0].endswith("model.py:12 (forward)") or found.tables["lines"][1][0]


def test_a_hostile_one_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pickle").write_bytes(b"cos\nsystem\n(S'touch made'\ntR.")
    assert main(["report", str(tmp_path / "x.pickle")]) == 1
    assert "tries to run os.system" in capsys.readouterr().err
