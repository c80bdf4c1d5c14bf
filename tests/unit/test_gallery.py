"""The gallery is as old as the schema at most, and its list says what its pages say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fakedist.report.page.assets import plotly_text
from fakedist.rundir.schema import SCHEMA_VERSION
from tests.unit.report.reading import read_page

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted((ROOT / "reports").glob("*.html"))
README = (ROOT / "reports" / "README.md").read_text()
IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 1_300_000  # they are in the repository, once for every schema


@pytest.fixture(scope="module")
def make() -> Any:
    """reports/make.py, which is not in a package."""
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "reports" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_every_job_has_its_page_and_every_page_its_job(make: Any) -> None:
    names = {job.name for job in make.JOBS} | {f"{make.COMPARED[0]}-compared"}
    assert names == {path.stem for path in PAGES}
    assert make.readme() == README
    assert len(PAGES) >= 3


def test_a_job_whose_packages_are_missing_keeps_its_page_and_is_named(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make.Job("a", "A", 8, "examples/ddp_gpt.py", "-", needs=("no-such-package",))
    assert make.lacking(job) == ["no-such-package"]
    own = {"JOBS": (job,), "HERE": tmp_path, "readme": lambda: "list", "draw_tutorials": lambda folder, names: None}
    for name, value in own.items():
        monkeypatch.setattr(make, name, value)
    monkeypatch.setattr(make.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "a.html").write_text("old")
    monkeypatch.setattr(sys, "argv", ["make.py"])
    make.main()
    assert "a: kept as it is, no-such-package not installed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["make.py", "a"])
    with pytest.raises(SystemExit):  # it was asked for by name
        make.main()
    assert (tmp_path / "a.html").read_text() == "old"


def test_a_page_does_not_tell_where_it_was_made(make: Any) -> None:
    page = '<dt>command</dt><dd>x</dd>\n<dt>in</dt><dd class="code">/tmp/here</dd>\n<p>in /tmp/here/run</p>'
    assert make.without_directory(page, Path("/tmp/here")) == "<dt>command</dt><dd>x</dd>\n<p>in run</p>"
    assert [path.name for path in PAGES if "/tmp/" in path.read_text()] == []


def test_the_pages_share_the_plotly_that_their_reports_would_carry(make: Any) -> None:
    sharing = [path for path in PAGES if f'<script src="{make.PLOTLY}">' in path.read_text()]
    if sharing:  # a page whose packages were not installed is kept, and draws its charts itself
        kept = {job.name for job in make.JOBS if job.needs}
        assert {path.stem for path in PAGES} - {path.stem for path in sharing} <= kept
        assert (ROOT / "reports" / make.PLOTLY).read_bytes() == plotly_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_small_no_older_than_the_schema_and_does_not_say_where_it_was_made(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    words = " ".join(read_page(path.read_text()).words)
    assert re.findall(r"/(?:home|root|opt|work|Users)/\S+", words) == []
    found = re.search(r'<meta name="fakedist-schema" content="(\d+)">', path.read_text()[:2_000])
    assert found is not None
    assert int(found[1]) == SCHEMA_VERSION, "make gallery"


@pytest.mark.parametrize("path", [path for path in PAGES if "compared" not in path.name], ids=lambda path: path.stem)
def test_the_list_says_what_the_page_says(path: Path) -> None:
    row = next(line for line in README.splitlines() if f"({path.name})" in line)
    page = read_page(path.read_text())
    assert f"| {page.figures['peak_allocated']} |" in row
    command = next(line for line in README.splitlines() if line.endswith(f" {page.title}"))
    assert f"--world-size {row.split('|')[2].strip().replace(',', '')} " in command


def test_the_gallery_shows_a_picture_of_every_job(make: Any) -> None:
    for job in make.JOBS:
        if job.name.endswith("-loss-parallel"):  # compared with the one without, on a page of its own
            continue
        assert f'<a href="{job.name}.html"><img src="../docs/images/{job.name}.png"' in README
        assert (IMAGES / f"{job.name}.png").exists()
