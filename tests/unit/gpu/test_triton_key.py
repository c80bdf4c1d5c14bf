from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.gpu.tuning import kept_triton_key

_CACHE = """
from pathlib import Path
counted = []
def triton_key():
    counted.append(1)
    return (Path(__file__).parents[1] / "library.so").read_text()
"""


@pytest.fixture(autouse=True)
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "triton"
    (place / "runtime").mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "runtime" / "__init__.py").touch()
    (place / "runtime" / "cache.py").write_text(_CACHE)
    (place / "library.so").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "triton"}
    for name in kept:
        del sys.modules[name]
    yield place
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    sys.modules.update(kept)


def key(directory: Path) -> tuple[str, bool]:
    """The key in a process of its own, and whether it was computed there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    with kept_triton_key(directory):
        cache = importlib.import_module("triton.runtime.cache")
        found = [cache.triton_key() for _ in range(2)]
    assert found[0] == found[1]
    assert len(cache.counted) <= 1
    return found[0], bool(cache.counted)


def test_a_key_is_computed_once_for_all_processes(tmp_path: Path) -> None:
    assert key(tmp_path / "keys") == ("one", True)
    assert key(tmp_path / "keys") == ("one", False)


def test_another_file_of_the_same_size_has_another_key(tmp_path: Path, triton: Path) -> None:
    key(tmp_path / "keys")
    (triton / "library.so").write_text("two")
    os.utime(triton / "library.so", ns=(0, 0))
    assert key(tmp_path / "keys") == ("two", True)


def test_an_empty_file_and_a_place_that_takes_none_are_no_keys(tmp_path: Path) -> None:
    key(tmp_path / "keys")
    (kept,) = (tmp_path / "keys").iterdir()
    kept.write_text("")
    assert key(tmp_path / "keys") == ("one", True)
    (tmp_path / "file").touch()
    assert key(tmp_path / "file") == ("one", True)


def test_a_file_that_cannot_be_looked_at_has_the_key_computed(tmp_path: Path, triton: Path) -> None:
    (triton / ".#driver.py").symlink_to("/nowhere/driver.py")
    assert key(tmp_path / "keys") == ("one", True)
    assert key(tmp_path / "keys") == ("one", True)
