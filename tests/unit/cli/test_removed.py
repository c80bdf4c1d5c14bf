"""Options and commands that were removed are refused by name, with what to type instead."""

from __future__ import annotations

import pytest

from fakedist.cli.program import main


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["view", "--live", "RUN"], "--live was removed: fakedist report says whether a run is still being written"),
        (["play", "RUN", "--format", "html"], "'html' is not one of 'text', 'json', 'markdown', 'csv'"),
        (
            ["topology", "--world-size", "8", "train.py"],
            "topology was removed: fakedist report RUN --section communication",
        ),
        (["profile", "--gpu-lag", "estimated", __file__], "--gpu-lag is one of none, full, not 'estimated'"),
        (["check", "--sarif", "out.sarif"], "--sarif was removed: --junit FILE and --annotations"),
    ],
)
def test_what_was_removed_is_refused_in_one_line_with_what_to_type(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err.splitlines()
    assert why in error[0]
    assert len(error) == 2
