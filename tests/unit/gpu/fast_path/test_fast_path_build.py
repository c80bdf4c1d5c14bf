"""The fast path is built once, and a machine that cannot build it does without."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fakedist.errors import SetupError
from fakedist.extras.play.player import PLAYER
from fakedist.gpu.fast_path import build
from fakedist.gpu.fast_path.compiled import make_fast_path


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FAKEDIST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return os.fspath(path)


def test_without_a_compiler_python_runs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SetupError, match=r"no C\+\+ compiler was found"):
        build.FAST_PATH.ensure()
    assert make_fast_path(None) is None


def test_a_compiler_that_failed_is_not_tried_again_by_every_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", _compiler(tmp_path / "c++", f"echo called >> {calls}; echo no header >&2; exit 1"))
    for _ in range(3):
        with pytest.raises(SetupError, match="no header"):
            build.FAST_PATH.ensure()
    assert calls.read_text().count("called") == 1
    said = "fakedist: compiling the fast path of recorded operations, once for this torch: up to half a minute\n"
    assert capsys.readouterr() == ("", said)
    monkeypatch.setenv("CXX", _compiler(tmp_path / "other", f"echo called >> {calls}; exit 1"))
    with pytest.raises(SetupError):
        build.FAST_PATH.ensure()
    assert calls.read_text().count("called") == 2
    assert not list(cache.glob("*.so"))


def test_a_compiler_of_what_no_run_goes_without_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", _compiler(tmp_path / "c++", f"echo called >> {calls}; exit 1"))
    for _ in range(2):
        with pytest.raises(SetupError):
            PLAYER.ensure()
    assert calls.read_text().count("called") == 2


def test_a_library_in_the_cache_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.FAST_PATH.path().touch()
    monkeypatch.setenv("PATH", "")
    assert build.FAST_PATH.ensure() == build.FAST_PATH.path()
    assert capsys.readouterr() == ("", "")
