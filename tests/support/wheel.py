"""The wheel of these sources, built without the network: the tests install setuptools."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(scratch: Path) -> Path:
    """The wheel that runs everywhere, of a copy of the sources."""
    sources, built = scratch / "sources", scratch / "wheel"
    shutil.copytree(ROOT / "fakedist", sources / "fakedist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, sources / name)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(built)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sources)], check=True, capture_output=True)
    (made,) = built.glob("*.whl")
    return made
