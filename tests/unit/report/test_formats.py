import csv
import io
import json
import os
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from fakedist.cli import main
from fakedist.report.content.run import run_report
from fakedist.report.render.markdown import MAX_CHARACTERS, report_markdown
from fakedist.results.opening import open_run
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.report.handmade import built, ended_well, out_of_memory


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_markdown_says_the_verdict_and_every_table(tmp_path: Path) -> None:
    text = report_markdown(run_report(ended_well(tmp_path / "run")))
    recorded = "(2 steps recorded; validation and saving did not run)"
    of = "986.00 MiB of it for NCCL, estimated: 78.04 GiB is left"
    assert f"\n**fits** {recorded}, headroom 79.00 GiB, {of}\n" in text
    assert text.count("<details>") == text.count("</details>") == 9
    assert "| layers.0-2.mlp x3 |" in text
    assert "up to 821.51 MiB less reserved: use expandable segments" in text
    assert "- a word that a reader of these figures must know" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(tables) == 9
    assert all(len({line.count("|") for line in lines}) == 1 for lines in tables)  # every row as many cells
    assert "\n**does not fit**: " in report_markdown(run_report(out_of_memory(tmp_path / "full")))


def test_markdown_fits_a_comment(tmp_path: Path) -> None:
    made = HandMade()
    for number in range(400):
        layer = made.layer("|" * 500 + f"<b>{number}")
        made.op("forward", 1, layer)
        made.alloc(number * MIB, MIB)
    run = built(made, tmp_path / "run")
    text = report_markdown(run_report(run))
    assert len(text) < MAX_CHARACTERS + 200
    assert text.endswith("did not fit here.\n")
    assert "<b>" not in text


def test_csv_is_plain_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended_well(tmp_path / "run")
    layers = list(csv.DictReader(io.StringIO(printed(capsys, "report", run, "--format", "csv"))))
    row = next(row for row in layers if row["name"] == "layers.0-2.mlp")
    assert (row["num_repeats"], row["peak_parameter_bytes"]) == ("3", str(48 * MIB))
    blocks = printed(capsys, "report", run, "--format", "csv", "--table", "blocks").splitlines()
    assert len(blocks) == len(open_run(run).table("blocks")) + 1
    assert main(["report", str(run), "--format", "csv", "--table", "secrets"]) == 2
    assert "no table is called 'secrets'" in capsys.readouterr().err


def test_json_is_json_both_ways_and_names_the_advice_of_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_well(tmp_path / "run")
    text = printed(capsys, "report", run, "--json")
    assert text == printed(capsys, "report", run, "--format", "json")
    markdown = printed(capsys, "report", run, "--format", "markdown")
    assert [piece["rule"] for piece in json.loads(text)["advice"]] == ["expandable-segments"]
    assert "use expandable segments" in markdown


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_browser")
def test_view_says_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ended_well(tmp_path / "run")
    assert printed(capsys, "view", run) == f"{(run / 'report.html').resolve().as_uri()}\n"
    assert (run / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("no_browser")
def test_view_shows_no_page_of_somebody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (old := tmp_path / "tmp" / "fakedist-view-old").mkdir(parents=True)
    os.utime(old, (0, 0))
    run, elsewhere = ended_well(tmp_path / "run"), tmp_path / "elsewhere"
    (run / "report.html").write_text("<script>planted()</script>")
    printed(capsys, "view", run)
    assert "planted" not in (run / "report.html").read_text()
    elsewhere.write_text("mine")
    (run / "report.html").unlink()
    (run / "report.html").symlink_to(elsewhere)
    shown = Path(unquote(urlsplit(printed(capsys, "view", run).strip()).path))
    assert shown.parent.parent == tmp_path / "tmp"
    assert shown.read_text().startswith("<!doctype html>")
    assert (elsewhere.read_text(), old.exists()) == ("mine", False)
