"""The cache of built libraries: it is a directory that no other user may write to."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fakedist.errors import SetupError
from fakedist.gpu.native import build_directory, cache_directory


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("FAKEDIST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "home"


def temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"fakedist-{os.geteuid()}"


@pytest.mark.parametrize("mode", [None, 0o755])
def test_a_cache_may_be_entered_by_its_user_alone(home: Path, mode: int | None) -> None:
    cache = home / ".cache/fakedist"
    if mode is not None:
        cache.mkdir(parents=True, mode=mode)
    assert cache_directory() == cache
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_may_write_to_is_not_taken(home: Path) -> None:
    (home / ".cache/fakedist").mkdir(parents=True)
    (home / ".cache/fakedist").chmod(0o777)
    assert cache_directory() == temporary()
    temporary().chmod(0o770)
    with pytest.raises(SetupError, match=r"/\.cache/fakedist may be written by .*; .* may be written by"):
        cache_directory()


def test_another_users_directory_is_not_taken_nor_their_link_to_ours(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    real = os.lstat
    temporary().symlink_to(home)

    def planted(path: Path) -> os.stat_result:
        found = real(path)
        return os.stat_result((*found[:4], 65534, *found[5:])) if Path(path) == temporary() else found

    monkeypatch.setattr(os, "lstat", planted)
    with pytest.raises(SetupError, match="belongs to another user") as raised:
        cache_directory()
    assert "FAKEDIST_CACHE=" in raised.value.hint


def test_the_chosen_cache_is_looked_at_too_and_so_is_who_may_move_it_away(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = home / "shared"
    shared.mkdir()
    for mode, chosen, refused in (
        (0o1777, shared, "shared may be written by other users"),
        (0o777, shared / "mine", r"may be moved by other users, who may write to .*shared"),
    ):
        shared.chmod(mode)
        monkeypatch.setenv("FAKEDIST_CACHE", str(chosen))
        with pytest.raises(SetupError, match=refused):
            cache_directory()
    shared.chmod(0o1777)
    assert cache_directory() == shared / "mine"


def test_one_process_builds_at_a_time(home: Path) -> None:
    cache = cache_directory()
    done: list[str] = []

    def build(name: str) -> None:
        with build_directory(cache) as scratch:
            assert [path for path in cache.iterdir() if path.is_dir()] == [scratch]
            done.append(name)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(build, "abcdefgh"))
    assert sorted(done) == list("abcdefgh")
    assert not [path for path in cache.iterdir() if path.is_dir()]
