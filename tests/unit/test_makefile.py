"""`make help` lists every target once, those of every day first, as CONTRIBUTING does."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_help_lists_the_targets_of_every_day_and_then_the_others() -> None:
    made = subprocess.run(["make", "--silent", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    everyday, others = (re.findall(r"^  ([a-z-]+) ", part, re.MULTILINE) for part in made.split("More:"))
    contributing = (ROOT / "CONTRIBUTING.md").read_text().partition("```\n")[2].partition("```")[0]
    assert everyday == re.findall(r"^make ([a-z-]+) ", contributing, re.MULTILINE)
    assert len(everyday) == 8
    described = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted([*everyday, *others]) == sorted(described)
    assert max(map(len, made.splitlines())) <= 125
