from __future__ import annotations

import pytest

from fakedist.report.text.wording import note_texts, short_line
from fakedist.rundir.notes import Note


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("/job/train.py:7 (main)", "train.py:7 (main)"),
        ("/env/lib/python3.11/site-packages/torch/nn/modules.py:3 (forward)", "torch/nn/modules.py:3 (forward)"),
        ("/usr/lib/python3.11/runpy.py:88 (_run_code)", "python3.11/runpy.py:88 (_run_code)"),
        (f"/home/me/.cache/inductor/3x/c{'a7' * 25}q.py:2 (call)", f"c{'a7' * 25}q.py:2 (call)"),
        ("/elsewhere/config.py:1 (<module>)", "/elsewhere/config.py:1 (<module>)"),
    ],
)
def test_files_are_named_from_where_the_command_was_given_or_where_packages_are(line: str, short: str) -> None:
    assert short_line(line, "/job") == short


@pytest.mark.parametrize(
    ("cwd", "text"), [("/home/me", "at train.py:3"), ("/", "at /home/me/train.py:3"), ("", "at /home/me/train.py:3")]
)
def test_notes_name_files_from_where_the_command_was_given(cwd: str, text: str) -> None:
    assert note_texts([Note("told", "at /home/me/train.py:3")], cwd) == [text]
