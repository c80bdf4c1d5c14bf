"""Every command of the tutorials, in their order, in a folder with the examples."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT, RunFakedist

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("fakedist ")]
    return [shlex.split(line)[1:] for line in lines]


@pytest.mark.nightly
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_its_commands_work(page: Path, run_fakedist: RunFakedist, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if page.stem == "it-does-not-fit":
        first, *others = commands(page)
        finished = run_fakedist(*first, cwd=tmp_path)
        assert finished.code == 4
        assert "what would make it fit, estimated: checkpoint layers.0-31" in finished.stdout
    else:
        others = commands(page)
    assert len(others) >= 5
    for command in others:
        finished = run_fakedist(*command, cwd=tmp_path)
        assert finished.code == 0, (command, finished.stderr)
