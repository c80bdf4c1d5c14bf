"""Commands in README.md and the documents exist, with the options that they are shown with."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from fakedist.cli.entry import cli

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def shown(page: str) -> list[list[str]]:
    """The words of each fenced fakedist command, without its comment."""
    lines = "\n".join(_FENCED.findall((ROOT / page).read_text())).replace("\\\n", " ").splitlines()
    lines = [line.removeprefix("$ ").partition(" #")[0] for line in lines]
    return [line.split() for line in lines if re.match(r"fakedist [a-z]", line)]


def options(command: click.Command) -> set[str]:
    return {"--help", "--version"} | {
        name for option in command.params for name in (*option.opts, *option.secondary_opts)
    }


@pytest.mark.parametrize("page", PAGES)
def test_each_fenced_command_exists_with_its_options(page: str) -> None:
    unknown = []
    for words in shown(page):
        command = cli.commands.get(words[1])
        if command is None:
            unknown.append(words[1])
            continue
        own = next(
            (at for at, word in enumerate(words) if word.endswith(".py")), len(words)
        )  # the rest is the script's
        used = {word.partition("=")[0] for word in words[2:own] if word.startswith("-") and word != "--"}
        unknown += [f"{words[1]} {word}" for word in used - options(command)]
    assert unknown == []


def test_the_list_of_commands_has_each_and_the_front_page_three_groups_of_four() -> None:
    named = {words[1] for words in shown("docs/commands.md")}
    assert named >= set(cli.commands) - {"export", "completion"}  # of use with other programs
    groups = (ROOT / "README.md").read_text().partition("## What it is for")[2].partition("\n## ")[0]
    assert [block.count("fakedist ") for block in _FENCED.findall(groups)] == [4, 4, 4]


def test_the_front_page_begins_with_what_make_does() -> None:
    first = next(block for block in _FENCED.findall((ROOT / "README.md").read_text()) if block.startswith("make"))
    targets = re.findall(r"^make (\w+)", first, flags=re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE) for target in targets)
