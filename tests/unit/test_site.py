"""The web site: every link leads to a file and a heading of it, and no page fetches anything from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reports.site import build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GITHUB_REPOSITORY", raising=False)
        build(folder)
    return folder


def written(site: Path) -> list[Path]:
    return [path for path in site.rglob("*.html") if path.parent != site / "reports" or path.name == "index.html"]


def test_every_link_leads_to_a_file_and_a_heading(site: Path) -> None:
    broken = []
    for page in written(site):
        for link in re.findall(r'(?:href|src)="([^"]*)"', page.read_text()):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            text = target.read_text() if target.suffix == ".html" and target.exists() else ""
            is_missing = anchor and target in written(site) and f'id="{anchor}"' not in text
            if not target.is_file() or is_missing:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_the_pictures_lead_to_the_gallery_and_on_to_the_rendered_pages(site: Path) -> None:
    assert set(re.findall(r'<a href="([^"]+)"><img', (site / "index.html").read_text())) == {"reports/index.html"}
    linked = set(re.findall(r'<a href="([^"/]+\.html)"><img', (site / "reports/index.html").read_text()))
    assert len(linked) >= 8
    assert all((site / "reports" / page).is_file() for page in linked)


def test_no_page_fetches_from_elsewhere(site: Path) -> None:
    for path in [*written(site), *(site / "docs/images").glob("*.svg")]:
        text = path.read_text()
        assert not re.findall(r'(?:src="|url\(|@import |<link [^>]*href=")["\']?https?:', text), path


def test_links_to_sources_lead_to_the_repository_that_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "them/fakedist")
    monkeypatch.setenv("GITHUB_SHA", "abc")
    build(tmp_path / "site")
    tutorial = (tmp_path / "site/docs/tutorials/a-build-that-fails.html").read_text()
    assert 'href="https://github.com/them/fakedist/blob/abc/examples/ci/gitlab-ci.yml"' in tutorial
