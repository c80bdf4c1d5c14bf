"""The list of the Python files that a run read."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.rank.read_files import _SPAWNING, listed_sources
from fakedist.rundir.sources import RunSources, read_sources


def read(path: Path) -> RunSources:
    sources = read_sources(path)
    assert sources is not None
    return sources


def test_files_that_are_imported_run_or_opened_are_listed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in _SPAWNING:
        monkeypatch.delitem(sys.modules, name, raising=False)  # an earlier test of this process may have needed it
    for name in ("imported_one", "imported_two", "ran", "opened", "in_a_fork", "unused", "data"):
        (tmp_path / f"{name}.{'txt' if name == 'data' else 'py'}").write_text("import json.tool\n")
    importlib.import_module("imported_one")  # writes the cache, and a fork server would have imported it
    with listed_sources(tmp_path / "list") as sources:
        del sys.modules["imported_one"]
        importlib.import_module("imported_one")
        importlib.import_module("imported_two")
        runpy.run_path(str(tmp_path / "ran.py"))
        (tmp_path / "opened.py").read_text()
        (tmp_path / "data.txt").read_text()
        with pytest.raises(ImportError):
            importlib.import_module("absent.optional")
        if not (child := os.fork()):
            importlib.import_module("in_a_fork")
            os._exit(0)
        os.waitpid(child, 0)
        sources.imported()
    (tmp_path / "unused.py").read_text()  # the list is complete
    listed = read(tmp_path / "list")
    mine = {Path(file).name for file in listed.files if Path(file).parent == tmp_path.resolve()}
    assert mine == {"imported_one.py", "imported_two.py", "ran.py", "opened.py", "in_a_fork.py"}
    assert not any("/site-packages/" in file or "/fakedist/rank/" in file for file in listed.files)
    assert {"absent", "imported_two", "pytest"} <= listed.names  # the last was imported before
    assert listed.is_whole


def test_another_python_may_read_other_files(tmp_path: Path) -> None:
    with listed_sources(tmp_path / "a"):
        subprocess.run(["true"], check=True)
    assert read(tmp_path / "a").is_whole
    with listed_sources(tmp_path / "b"):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    assert not read(tmp_path / "b").is_whole
    with listed_sources(tmp_path / "c"):
        sys.modules.pop("multiprocessing.popen_spawn_posix", None)
        importlib.import_module("multiprocessing.popen_spawn_posix")
    assert not read(tmp_path / "c").is_whole
    assert read_sources(tmp_path / "absent") is None
