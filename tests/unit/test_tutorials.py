"""Figures of the tutorials are held to what their commands print."""

from pathlib import Path

import pytest

from reports import tutorials

PRINTED = """\
it takes 57.87 GiB, the step +24% to 28%
GPU    step
gb200  2.59 s (2.40 to 2.81)  at most 3 of 128 blocks
"""
QUOTED = """\
```
fakedist time RUN
```

```
gb200  2.59 s (2.40 to 2.81)
```

It takes 57.9 GiB, and a quarter longer: 24%.
"""


def stale(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, shown: str = PRINTED) -> list[str]:
    """The figures of a page and of a picture of what was shown that are not those of ``PRINTED``."""
    monkeypatch.setattr(tutorials, "IMAGES", folder)
    (folder / "page.md").write_text(text)
    (folder / "page-0.svg").write_text(tutorials.terminal_svg("fakedist time RUN", shown))
    return tutorials.drifts(folder / "page.md", [PRINTED])


def test_a_tutorial_with_the_figures_of_its_commands_has_none_that_drifted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert stale(monkeypatch, tmp_path, QUOTED) == []
    assert stale(monkeypatch, tmp_path, QUOTED.replace("2.40", "2.42"), PRINTED.replace("2.81", "2.83")) == []
    # Styles divide a line of a picture.
    assert stale(monkeypatch, tmp_path, QUOTED, PRINTED.replace("2.59 s", "\x1b[1m2.59 s\x1b[0m")) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("2.59", "3.02", "no command prints: gb200  3.02 s (2.40 to 2.81)"),
        ("(2.40", "(2.45", "no command prints: gb200  2.59 s (2.45 to 2.81)"),
        ("gb200", "gb300", "no command prints: gb300  2.59 s (2.40 to 2.81)"),
        ("57.9 GiB", "58.9 GiB", "no command prints 58.9 GiB"),
        ("24%", "26%", "no command prints 26 %"),
    ],
)
def test_a_figure_of_a_tutorial_that_drifted_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, found: str
) -> None:
    assert stale(monkeypatch, tmp_path, QUOTED.replace(old, new)) == [found]


def test_a_picture_is_held_to_its_own_command_and_has_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drifted = stale(monkeypatch, tmp_path, QUOTED, PRINTED.replace("2.59", "3.02"))
    assert [" ".join(line.split()) for line in drifted] == [
        "page-0.svg: gb200 3.02 s (2.40 to 2.81) at most 3 of 128 blocks"
    ]
    assert stale(monkeypatch, tmp_path, QUOTED, "GPU    step") == ["page-0.svg: has no figures"]
