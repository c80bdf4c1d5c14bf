import warnings

import pytest

from fakedist import frames
from fakedist.record.dispatch import warnings_at_the_script


def shown_at(filename: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The line at which a warning of this file is shown."""
    shown: list[tuple[str, int]] = []
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, category, name, line, *more: shown.append((name, line))
    )
    with warnings_at_the_script():
        warnings.showwarning("text", UserWarning, filename, 7)
    ((name, line),) = shown
    return name, line


def test_a_warning_of_the_recorder_names_the_scripts_line(monkeypatch: pytest.MonkeyPatch) -> None:
    name, line = shown_at(f"{frames.OURS}record/dispatch.py", monkeypatch)
    assert name == __file__
    assert line != 7


def test_other_warnings_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_at("/job/train.py", monkeypatch) == ("/job/train.py", 7)
