"""Every command of the tutorials, in their order, in a folder with the examples."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from reports.tutorials import configuration, steps
from tests.conftest import ROOT, RunFakedist

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
#: By page: of which commands the exit code is not 0.
CODES = {"it-does-not-fit": {0: 4}, "a-build-that-fails": {1: 3, 2: 3}}
#: By page: a sentence that a command prints.
SENTENCES = {
    "it-does-not-fit": (0, "what would make it fit, estimated: checkpoint layers.0-31"),
    "choose-a-layout": (0, "fastest that fits with 5% headroom: tp1 checkpoint=full"),
    "a-build-that-fails": (1, "activations of h.*.mlp"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_its_commands_work(page: Path, run_fakedist: RunFakedist, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    folder, number = tmp_path, 0
    for step in steps(page):
        if step[0] == "fakedist":
            (folder / "fakedist.toml").write_text(configuration(page) or "[check]\njobs = []\n")
            finished = run_fakedist(*step[1:], cwd=folder)
            assert finished.code == CODES.get(page.stem, {}).get(number, 0), (step, finished.stdout, finished.stderr)
            at, sentence = SENTENCES[page.stem]
            assert number != at or sentence in finished.stdout
            number += 1
        elif step[0] == "cd":
            folder /= step[1]
        elif step[0] != "git":
            subprocess.run(step, cwd=folder, check=True)
    assert number >= 5
