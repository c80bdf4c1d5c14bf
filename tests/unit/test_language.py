"""Phrases that read like a translation must not come back: each has a plainer form, named here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

#: What is read. More of the project is held to the list by naming it here.
GLOBS = (
    "*.md",
    "*.yml",
    ".ci/*",
    "Makefile",
    "cli.py",
    "pyproject.toml",
    "docs/**/*.md",
    "bench/**/*.md",
    "bench/**/*.py",
    "examples/**/*.py",
    "examples/**/*.yml",
    "reports/*.md",
    "reports/*.py",
    "fakedist/**/*.py",
    "fakedist/gpu/driver/*.[ch]",
    "fakedist/report/page/templates/*",
    "fakedist/report/page/scripts/*.js",
    "tests/page/*.js",
    "tests/**/*.py",
    "tests/**/*.sh",
)
#: This file, which quotes the phrases.
EXCEPT = {"tests/unit/test_language.py"}

#: A phrase, as a regular expression -> what to write instead. A space stands for any white space.
PHRASES = {
    r"\b(?:no|some)body\b": "name who: the script, a kernel, the other ranks; or use the passive",
    r"\bis there\b": "is available, exists, is installed",
    r"\bat hand\b": "available",
    r"\bbeside\b": "in addition to, outside, next to; of a place on disk: list the words under ALLOWED",
    r"\b(?:says?|said|saying) so\b": "reports that, states that; or name what is reported",
    r"\bwhat (?:it|they|this|that) says? (?:on|of)\b": "its calls on, its figures for",
    r"\b(?:hangs?|hung|hanging) on\b": "depends on",
    r"\bwhere no (?:[\w'-]+ ){1,3}(?:is|are)(?= ?(?:[,.;:)|]|$))": "without a, if there is no",
    r"\banother one\b": "another, with its noun",
    r"\bwho waits\b": "what waits, a rank that waits",
    r"(?<!there\s)\b(?:is|are|was|were) no\b(?! (?:longer|more|less|fewer|better|worse|larger|later)\b)": (
        "is not a; without; there is no"
    ),
    r"\bgo(?:es)? before\b": "precedes, comes before, is in front of",
    r"\b(?:is|are|was|were) told\b": "is given, is reported, is passed; gets",
    r"\bmade again\b": "rebuilt, made anew, repeated",
    r'"""What\b': "name the thing, or begin with a verb",
    r"[.!?] Whether\b": "a subject that is a clause: say who decides or knows it",
}

#: A phrase in its literal sense.
ALLOWED = (
    "beside the script",  # a file on disk
    "beside the old ones",  # the same
    'tmp_path / "beside"',  # a directory next to the script
    "'beside')",  # the same
    'streams["beside"]',  # a column
    *("row.beside", '"beside": ', "beside: ", "beside="),  # a key of --json
)

_ANCHOR = re.compile(r'<a id="[^"]*">')


def offences(text: str) -> list[tuple[int, str, str]]:
    """Line, phrase as written and advice, for each phrase in a text that it should not have."""
    text = _ANCHOR.sub(lambda found: " " * len(found[0]), text)
    allowed = [found.span() for words in ALLOWED for found in re.finditer(_spaced(re.escape(words)), text)]
    return sorted(
        (text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), advice)
        for phrase, advice in PHRASES.items()
        for found in re.finditer(_spaced(phrase), text, re.IGNORECASE | re.MULTILINE)
        if not any(start <= found.start() and found.end() <= end for start, end in allowed)
    )


def _spaced(pattern: str) -> str:
    """The pattern with its spaces matching a line's end too, as text is wrapped anywhere."""
    return pattern.replace(r"\ ", " ").replace(" ?", r"\s*").replace(" ", r"\s+")


def test_the_words_are_plain() -> None:
    paths = sorted({path for glob in GLOBS for path in ROOT.glob(glob)})
    found = [
        f"{name}:{line}: {words!r}: {advice}"
        for path in paths
        if (name := path.relative_to(ROOT).as_posix()) not in EXCEPT
        for line, words, advice in offences(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_every_place_that_is_named_has_files() -> None:
    assert [glob for glob in GLOBS if not any(ROOT.glob(glob))] == []
    assert [name for name in EXCEPT if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("values that nobody computed", "nobody"),
        ("Somebody has to free it", "Somebody"),
        ("on a GPU, where one is there", "is there"),
        ("no GPU was at\nhand", "at hand"),
        ("what the GPU holds beside the allocator", "beside"),
        ("the report says so.", "says so"),
        ("the notes say\nso", "say so"),
        ("what it says on each group", "what it says on"),
        ("that hangs on the estimate", "hangs on"),
        ("runs where no GPU is.", "where no GPU is"),
        ("where no Nsight Systems is, it ends", "where no Nsight Systems is"),
        ("where no rank needs another one's tape", "another one"),
        ("and who waits for one waits for nothing", "who waits"),
        ("a copy is no kernel", "is no"),
        ("\nranks that are\nno peers"[1:], "are no"),
        ("the class goes before the name", "goes before"),
        ("the child is told its rank", "is told"),
        ("the driver is made again", "made again"),
        ('"""What a launch needs."""', '"""What'),
        ("it runs. Whether it fits has never been measured", ". Whether"),
    ],
)
def test_a_phrase_is_found_with_its_line(text: str, words: str) -> None:
    assert [(line, found) for line, found, _ in offences(f"first\n{text}\n")] == [(2, words)]


@pytest.mark.parametrize(
    "text",
    [
        "a file called `torch.py` beside the script",
        "Tables are made beside the old\nones",
        '<a id="beside-the-allocator"></a>',
        "2 us besides",
        "it says some",
        "where no kernel is launched",
        "hands on",
        "there is",
        "unless there is no layer",
        "this is no longer so, and is no more than 3",
        '"""Whether a block is alive."""',
        "is_alive: Whether it is.",
    ],
)
def test_the_literal_sense_is_allowed(text: str) -> None:
    assert offences(text) == []
