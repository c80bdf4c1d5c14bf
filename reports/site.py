"""Build the web site: README.md, the documents and the gallery as HTML, with the pages of reports/ as they are.

    python -m reports.site FOLDER

Links between documents lead to their HTML. With GITHUB_REPOSITORY set, links to other files lead to that repository;
else they are text. No page fetches anything from elsewhere.
"""

from __future__ import annotations

import html
import os
import posixpath
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
#: Documents of the site, and files that are copied.
_DOCUMENTS = ("*.md", "docs/**/*.md", "reports/*.md", "bench/*.md")
_COPIED = ("docs/images/*", "docs/accuracy/*.json", "reports/*.html", "reports/*.js", "LICENSE")
_EXTERNAL = re.compile(r"[a-z]+:")
_LINK = re.compile(r'(<a href="|<img src=")([^"]+)(")')
_LAYOUT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem; max-width: 60rem; font: 16px/1.5 system-ui, sans-serif; }}
nav {{ display: flex; flex-wrap: wrap; gap: 1rem; padding-bottom: .5rem; border-bottom: 1px solid #8886; }}
img {{ max-width: 100%; height: auto; }}
pre {{ overflow-x: auto; padding: .75rem; background: #8882; }}
code {{ font-size: .875em; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; }}
th, td {{ padding: .25rem .5rem; border: 1px solid #8886; text-align: left; vertical-align: top; }}
</style>
</head>
<body>
<nav>{links}</nav>
<main>
{body}
</main>
</body>
</html>
"""
_NAVIGATION = {
    "README.md": "fakedist",
    "reports/README.md": "Gallery",
    "docs/truth.md": "Published figures",
    "docs/accuracy/results.md": "Accuracy",
    "docs/README.md": "Documentation",
}


def build(folder: Path) -> None:
    """Write the site into a folder, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    copied = _names(_COPIED)
    for name in copied:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    pages = {name: _page_of(name) for name in _names(_DOCUMENTS)}
    for name, page in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(_rendered(name, pages, frozenset(copied)))


def _names(patterns: tuple[str, ...]) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def _page_of(document: str) -> str:
    """The page of a document; that of a folder's README.md is its index."""
    path = PurePosixPath(document)
    return str(path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))


def _rendered(name: str, pages: dict[str, str], copied: frozenset[str]) -> str:
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = markdown.parse((ROOT / name).read_text())
    titles = _anchored(tokens)
    body = markdown.renderer.render(tokens, markdown.options, {})
    folder = posixpath.dirname(name)

    def leads(link: re.Match[str]) -> str:
        return f"{link[1]}{html.escape(_target(html.unescape(link[2]), folder, pages, copied))}{link[3]}"

    body = re.sub(r'<a href="">(.*?)</a>', r"\1", _LINK.sub(leads, body), flags=re.DOTALL)
    links = (
        f'<a href="{_target(posixpath.relpath(to, folder or "."), folder, pages, copied)}">{text}</a>'
        for to, text in _NAVIGATION.items()
    )
    title = titles[0] if titles else name
    return _LAYOUT.format(title=html.escape(title), links="".join(links), body=body)


def _anchored(tokens: list[Token]) -> list[str]:
    """Give headings the anchors that GitHub makes of them. Returns their texts."""
    titles = []
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            children = content.children or []
            text = "".join(child.content for child in children if child.type in ("text", "code_inline"))
            opening.attrSet("id", re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-"))
            titles.append(text)
    return titles


def _target(link: str, folder: str, pages: dict[str, str], copied: frozenset[str]) -> str:
    """Where a link of a document in a folder leads in the site; empty if it leads nowhere."""
    if _EXTERNAL.match(link) or link.startswith("#"):
        return link
    path, hash_, anchor = link.partition("#")
    name = posixpath.normpath(posixpath.join(folder, path))
    if f"{name}/README.md" in pages:
        name = f"{name}/README.md"
    if name in pages or name in copied:
        return posixpath.relpath(pages.get(name, name), folder or ".") + hash_ + anchor
    repository = os.environ.get("GITHUB_REPOSITORY", "")
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    return f"{server}/{repository}/blob/{os.environ.get('GITHUB_SHA', 'main')}/{name}" if repository else ""


if __name__ == "__main__":
    build(Path(sys.argv[1]))
