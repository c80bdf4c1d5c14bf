"""Links between the pages of the project lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "reports/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # an entry names what there was at that release
)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
#: Code has brackets that are not links, and lines that are not headings.
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings, and those that it names itself."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", (ROOT / page).read_text())):
        if re.match(r"[a-z]+:", link) or link.endswith("/deployments/github-pages"):  # GitHub has that one
            continue
        target, _, anchor = link.partition("#")
        path = ((ROOT / page).parent / target) if target else ROOT / page
        if not path.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append(f"{link}: there is no such heading")
    assert broken == []
