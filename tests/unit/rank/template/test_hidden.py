from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from fakedist.importing import when_imported
from fakedist.patch import patched
from fakedist.rank.template.hidden import HiddenFinder, HiddenModules
from fakedist.rank.template.recording import Recording

FILES = {
    "whole/__init__.py": "import os\nos.environ['OF_WHOLE'] = '1'\nfrom whole.part import part\nfrom . import shape\n",
    "whole/part.py": "import os, sys, types\nos.environ.get('RANK')\ndef part(): return 'part'\n"
    "sys.modules['whole.made'] = types.ModuleType('whole.made')\n",
    "whole/shape.py": "from whole import part\nLOG = []\n",
    "whole/late.py": "from whole.shape import LOG\nfrom importlib import import_module\nimport_module('whole.lazy')\n",
    "whole/lazy.py": "VALUE = 7\n",
    "attribute.py": "import whole.shape\nMINE = whole.shape.LOG\n",
    "keeps.py": "import __main__ as main\n",
    "alone.py": "from whole.shape import LOG\ntry:\n    import nowhere\nexcept ImportError:\n    pass\n",
}


class Template:
    """Modules of files, imported once and hidden."""

    def __init__(self) -> None:
        self.recording = Recording(devices=8)
        self.hidden = HiddenModules(self.recording.imported)
        self.differing: list[str] = []

    def load(self, *names: str) -> None:
        with self.recording.on():
            for name in names:
                importlib.import_module(name)

    @contextmanager
    def rank(self) -> Iterator[list[str]]:
        """As after the fork. Yields the modules that appear."""
        self.hidden.hide()
        appeared: list[str] = []
        self.hidden.appeared = appeared.append
        self.hidden.differs = self.differing.append
        finder = HiddenFinder(self.hidden)
        sys.meta_path.insert(0, finder)
        try:
            yield appeared
        finally:
            sys.meta_path.remove(finder)


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Template]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OF_WHOLE", "0")
    known, importer, import_module = set(sys.modules), __import__, importlib.import_module
    yield Template()
    for name in sys.modules.keys() - known:
        del sys.modules[name]
    assert (importlib.import_module, __import__) == (import_module, importer)
    assert type(os.environ).__name__ == "_Environ"


def test_a_hidden_module_is_not_there_until_it_is_imported(template: Template) -> None:
    template.load("whole")
    before = sys.modules["whole"]
    with template.rank() as appeared:
        assert [name for name in sys.modules if name.startswith("whole")] == []
        assert importlib.util.find_spec("whole") is not None
        assert appeared == []
        assert importlib.import_module("whole") is before
        assert appeared == ["whole.part", "whole.shape", "whole"]
        assert before.__spec__ is not None
        assert type(before.__spec__.loader).__name__ == "SourceFileLoader"


def test_only_what_an_import_asks_for_appears(template: Template) -> None:
    template.load("whole.late", "alone")
    with template.rank() as appeared:
        whole = importlib.import_module("whole")
        assert "whole.lazy" not in sys.modules
        assert not hasattr(whole, "lazy")
        del appeared[:]
        importlib.import_module("alone")
        assert appeared == ["alone"]
        importlib.import_module("whole.late")
        assert (appeared[1:], whole.lazy.VALUE) == (["whole.lazy", "whole.late"], 7)


def test_what_a_module_asked_for_appears_even_if_it_was_imported_before(template: Template) -> None:
    template.load("whole", "alone")
    with template.rank() as appeared:
        importlib.import_module("alone")
        assert appeared == ["whole.part", "whole.shape", "whole", "alone"]


def test_a_name_that_a_package_bound_to_something_else_stays_so(template: Template) -> None:
    template.load("whole")
    with template.rank():
        assert importlib.import_module("whole").part() == "part"


def test_modules_that_a_module_makes_appear_with_it(template: Template) -> None:
    template.load("whole")
    with template.rank():
        assert "whole.made" not in sys.modules
        importlib.import_module("whole")
        assert "whole.made" in sys.modules


def test_variables_that_an_import_sets_are_set_when_it_appears(template: Template) -> None:
    template.load("whole")
    os.environ["OF_WHOLE"] = "0"
    with template.rank():
        importlib.import_module("whole")
        assert os.environ["OF_WHOLE"] == "1"
        assert template.differing == []


def test_watchers_see_each_module_that_appears(template: Template) -> None:
    template.load("whole")
    seen: list[str] = []
    with (
        template.rank(),
        when_imported(lambda name: name.startswith("whole"), lambda module: seen.append(module.__name__)),
    ):
        importlib.import_module("whole")
    assert seen == ["whole.part", "whole.shape", "whole"]


def test_a_name_taken_from_a_module_is_what_stands_in_for_it_now(template: Template) -> None:
    template.load("whole.late")
    with template.rank():
        shape = importlib.import_module("whole.shape")
        with patched(shape, "LOG", ["ours"]):
            assert importlib.import_module("whole.late").LOG == ["ours"]


def test_what_a_framework_took_as_an_attribute_is_what_stands_in_for_it_now(template: Template) -> None:
    template.load("attribute")
    with template.rank():
        shape = importlib.import_module("whole.shape")
        with patched(shape, "LOG", ["ours"]):
            assert importlib.import_module("attribute").MINE == ["ours"]


def test_another_environment_is_named(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    template.load("whole")
    os.environ["OF_WHOLE"] = "0"
    with template.rank():
        monkeypatch.setenv("OTHER", "1")
        importlib.import_module("whole")
    assert template.differing == ["OTHER"]


def test_another_path_is_named(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    template.load("whole")
    os.environ["OF_WHOLE"] = "0"
    with template.rank():
        monkeypatch.syspath_prepend("/elsewhere")
        importlib.import_module("whole")
    assert template.differing == ["sys.path"]


def test_what_an_import_adds_to_sys_path_is_added_when_it_appears(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more" / "space").mkdir(parents=True)
    (tmp_path / "more" / "space" / "deep.py").write_text("VALUE = 3\n")
    adds = f"import sys\nsys.path.append({str(tmp_path / 'more')!r})\nsys.path.insert(0, 'first')\nimport space.deep\n"
    (tmp_path / "adds.py").write_text(adds)
    before = sys.path[:]
    template.load("adds")
    after = sys.path[:]
    monkeypatch.setattr(sys, "path", before)
    with template.rank() as appeared:
        import adds  # type: ignore[import-not-found]

        assert (sys.path, adds.space.deep.VALUE) == (after, 3)
        assert appeared == ["space.deep", "adds"]
        importlib.import_module("whole.part")
    assert template.differing == []


def test_an_import_that_takes_from_sys_path_is_told(template: Template, tmp_path: Path) -> None:
    (tmp_path / "takes.py").write_text("import sys\ndel sys.path[0]\n")
    template.load("takes")
    assert template.recording.imported["takes"].path_differs


@pytest.mark.parametrize(("devices", "differing"), [(8, []), (2, ["CUDA_VISIBLE_DEVICES"])])
def test_an_import_that_counts_devices_asks_cuda_when_it_appears(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, differing: list[str]
) -> None:
    asked = []
    torch, torch_c = ModuleType("torch"), ModuleType("torch._C")
    monkeypatch.setattr(torch, "_C", torch_c, raising=False)
    monkeypatch.setattr(torch_c, "_cuda_getDeviceCount", lambda: asked.append("CUDA") or devices, raising=False)
    for each in (torch, torch_c):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, "torch.utils._python_dispatch", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "counts.py").write_text("import torch\nNUMBER = torch._C._cuda_getDeviceCount()\n")
    template.load("counts")
    assert asked == []
    with template.rank():
        import counts  # type: ignore[import-not-found]

        assert (counts.NUMBER, asked) == (8, ["CUDA"])
    assert template.differing == differing


def test_an_import_that_compiles_or_runs_operations_does_so_when_it_appears(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, done = ModuleType("torch"), []
    monkeypatch.setattr(torch, "compile", lambda function: done.append("compile"), raising=False)
    monkeypatch.setattr(torch, "empty", lambda size, device: done.append(device), raising=False)
    template.load("whole.late")
    template.recording.imported["whole.shape"].compiled = True
    template.recording.imported["whole.lazy"].compiled = True
    template.recording.imported["whole.lazy"].operations = 2
    monkeypatch.setitem(sys.modules, "torch", torch)
    with template.rank():
        importlib.import_module("whole.shape")
        assert done == ["compile"]
        importlib.import_module("whole.late")
        assert done == ["compile", "cpu", "cpu"]


@pytest.mark.parametrize(("module", "differing"), [("whole", ["RANK"]), ("alone", ["RANK"])])
def test_a_ranks_variable_counts_once_a_module_has_read_it(
    template: Template, monkeypatch: pytest.MonkeyPatch, module: str, differing: list[str]
) -> None:
    template.load("whole", "alone")
    os.environ["OF_WHOLE"] = "0"
    with template.rank():
        monkeypatch.setenv("LOCAL_RANK", "3")
        monkeypatch.setenv("RANK", "3")
        importlib.import_module(module)
    assert template.differing == differing


def test_a_module_that_keeps_main_gets_the_ranks_own(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    template.load("keeps")
    with template.rank():
        monkeypatch.setitem(sys.modules, "__main__", sys)
        assert importlib.import_module("keeps").main is sys


def test_everything_is_shown_in_the_end(template: Template) -> None:
    template.load("whole.late")
    with template.rank() as appeared:
        template.hidden.show_all()
        assert sys.modules["whole"].late is sys.modules["whole.late"]
        assert sys.modules["whole"].part() == "part"
        assert appeared == []
