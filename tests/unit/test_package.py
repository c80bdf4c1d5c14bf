"""Public names stay public, and the wheel holds all that the program needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fakedist
from tests.support.wheel import build_wheel

ROOT = Path(__file__).parent.parent.parent


def test_the_public_names_are_these() -> None:
    names = """CheckError FakedistError InventedValueError JobError JobTime RecordingError ReportError Run
        RunDirectoryError ScriptError SetupError Sweep SweepError WorldError __version__ open open_sweep phase profile
        step time_job"""
    assert fakedist.__all__ == names.split()
    assert all(hasattr(fakedist, name) for name in fakedist.__all__)


def test_the_changelog_knows_this_version_and_the_reading_half_needs_all_but_torch() -> None:
    assert f"## [{fakedist.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name for name in project["dependencies"] if name.startswith("torch")] == []
    assert project["optional-dependencies"]["torch"] == ["torch>=2.10.0a0"]
    assert fakedist.step() is None  # outside of a run it does nothing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("package"))


@pytest.mark.long
def test_the_wheel_holds_every_source_of_the_package(wheel: Path) -> None:
    suffixes = {
        ".py",
        ".c",
        ".h",
        ".cpp",
        ".typed",
        ".j2",
        ".js",
        ".css",
        ".json",
        ".npz",
        ".csv",
        ".toml",
        ".gz",
        ".txt",
    }
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fakedist").rglob("*") if path.suffix in suffixes}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fakedist/")}
    assert names == expected


@pytest.mark.long
def test_the_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site), "FAKEDIST_CACHE": str(tmp_path / "cache")}
    statements = (
        "import fakedist, sys\n"
        "from fakedist.gpu.driver.build import ensure_driver\n"
        "print(fakedist.__file__, ensure_driver(), sep='\\n')"
    )

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=empty, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    package, driver = python("-c", statements).splitlines()
    assert Path(package).is_relative_to(site)
    assert Path(driver).is_relative_to(tmp_path / "cache")
    assert Path(driver).is_file()
    assert python("-m", "fakedist", "--version") == f"fakedist {fakedist.__version__}\n"
