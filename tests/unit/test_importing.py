"""Being told of an import, on every way that leads to one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fakedist.patch import when_imported

NAME = "watched_module"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to import from; what was imported is forgotten."""
    package = tmp_path / NAME
    package.mkdir()
    (package / "__init__.py").write_text("value = 1\n")
    (package / "part.py").write_text("value = 2\n")
    (tmp_path / "another_module.py").write_text(f"import {NAME}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in (NAME, "another_module")]:
        del sys.modules[name]


def is_watched(name: str) -> bool:
    return name == NAME


@pytest.mark.parametrize(
    "statement",
    [
        f"import {NAME}",
        f"import {NAME}.part",
        f"from {NAME}.part import value",
        f"from {NAME} import *",
        "import another_module",
        f"__import__('{NAME}')",
        f"import importlib; importlib.import_module('{NAME}.part')",
    ],
)
def test_every_way_to_import_tells_once_after_the_module_has_run(statement: str) -> None:
    values: list[int] = []
    with when_imported(is_watched, lambda module: values.append(module.value)):
        exec(statement, {})
        exec(statement, {})
        importlib.reload(sys.modules[NAME])
    assert values == [1, 1]  # the second is the reload's: its code has run again


def test_a_module_looks_as_if_it_was_not_watched() -> None:
    with when_imported(is_watched, lambda module: None):
        module = importlib.import_module(NAME)
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert inspect.getsource(module) == "value = 1\n"


def test_asking_for_a_spec_imports_nothing() -> None:
    told: list[ModuleType] = []
    with when_imported(is_watched, told.append):
        spec = importlib.util.find_spec(NAME)
        assert spec is not None
        assert spec.origin is not None
        assert importlib.util.find_spec("a_module_that_is_not_there") is None
    assert told == []


def test_finders_of_others_are_asked_before_and_behind(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = modules / "archive.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("in_an_archive.py", "value = 3\n")
    monkeypatch.syspath_prepend(archive)

    class Editable:
        """As an editable installation's: it finds a module that lies on no path."""

        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> object:
            if name != "installed_elsewhere":
                return None
            return importlib.util.spec_from_file_location(name, modules / NAME / "part.py")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    values = []
    with when_imported(
        lambda name: name in ("in_an_archive", "installed_elsewhere"), lambda module: values.append(module.value)
    ):
        sys.meta_path.insert(0, Editable)
        importlib.import_module("in_an_archive")
        sys.meta_path.pop(0)
        importlib.import_module("installed_elsewhere")
    assert values == [3, 2]
    del sys.modules["in_an_archive"], sys.modules["installed_elsewhere"]


def test_what_is_raised_there_the_import_raises_and_the_next_import_tells_again() -> None:
    class Unswallowed(BaseException):
        """Past every ``except Exception``."""

    def fail(module: ModuleType) -> None:
        raise Unswallowed

    def swallowing() -> None:
        try:
            importlib.import_module(NAME)
        except Exception:
            pytest.fail("swallowed")

    with when_imported(is_watched, fail):
        for _ in range(2):
            with pytest.raises(Unswallowed):
                swallowing()
            assert NAME not in sys.modules


def test_other_threads_have_the_module_when_everything_is_in_place() -> None:
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def told(module: ModuleType) -> None:
        inside.set()
        assert go_on.wait(10)
        order.append("told")

    def second() -> None:
        importlib.import_module(NAME)
        order.append("second")

    with when_imported(is_watched, told):
        first = threading.Thread(target=importlib.import_module, args=(NAME,))
        first.start()
        assert inside.wait(10)
        other = threading.Thread(target=second)
        other.start()
        go_on.set()
        first.join(10)
        other.join(10)
    assert order == ["told", "second"]


def test_nothing_is_left_of_it() -> None:
    before = list(sys.meta_path)
    told: list[ModuleType] = []
    with when_imported(is_watched, told.append):
        sys.meta_path[:] = list(sys.meta_path)
    assert sys.meta_path == before
    importlib.import_module(NAME)
    assert told == []
