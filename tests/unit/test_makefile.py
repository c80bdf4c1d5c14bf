"""`make help` lists every target once, those of every day first, as CONTRIBUTING does. `make` finds its Python."""

from __future__ import annotations

import os
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


#: Answers where PYENV_VERSION names its version, as pyenv's shims do where another version is the global one.
SHIM = """#!/bin/sh
[ "$PYENV_VERSION" = {version} ] && echo /versions/{version}/bin/python || exit 127
"""


def planned(target: str, folder: Path, *options: str) -> str:
    """The commands that make would run for a target, where a folder's programs come before the machine's."""
    chosen = ("PYTHON", "PYENV_VERSION", "MAKEFLAGS")  # by whoever runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    command = ["make", "--dry-run", target, *options]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def write_command(path: Path, content: str) -> None:
    path.write_text(content)
    path.chmod(0o755)


def test_make_takes_python_3_12_also_where_its_shim_needs_a_version(tmp_path: Path) -> None:
    write_command(tmp_path / "python3.12", SHIM.format(version="3.12"))
    assert "/versions/3.12/bin/python -m venv build/dist/tools" in planned("dist", tmp_path)
    assert "other -m venv build/dist/tools" in planned("dist", tmp_path, "PYTHON=other")


def test_make_takes_python3_where_no_python_3_12_works(tmp_path: Path) -> None:
    write_command(tmp_path / "python3.12", "#!/bin/sh\nexit 127\n")
    assert "\npython3 -m venv build/dist/tools" in planned("dist", tmp_path)


def test_make_python_finds_another_version_the_same_way(tmp_path: Path) -> None:
    write_command(tmp_path / "python3.13", SHIM.format(version="3.13"))
    target = ".venv-python-3.13/.installed"
    assert "/versions/3.13/bin/python -m venv .venv-python-3.13" in planned(target, tmp_path)
