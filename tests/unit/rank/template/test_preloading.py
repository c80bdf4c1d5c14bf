from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from fakedist.rank.template.hidden import HiddenModules
from fakedist.rank.template.learned import Learned, Scene
from fakedist.rank.template.preloading import compute_key, note_what_is_compiled
from fakedist.rank.template.recording import Recording
from fakedist.rank.template.serving import without

COMPILED = "def f(): pass\nf._torchdynamo_orig_callable = f\n"
FRAMEWORKS = {
    "plain": "def f(): pass\nclass Layer:\n    def run(self): pass\n",
    "compiles": COMPILED,
    "compiles_method": f"class Layer:\n    {COMPILED.splitlines()[0]}\nLayer.f._torchdynamo_orig_callable = Layer\n",
    "compiles_static": f"{COMPILED}class Layer:\n    g = staticmethod(f)\ndel f\n",
}


@pytest.fixture
def imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[HiddenModules]:
    name = request.param
    (tmp_path / f"{name}.py").write_text(FRAMEWORKS[name])
    monkeypatch.syspath_prepend(tmp_path)
    recording = Recording()
    with recording.on():
        __import__(name)
    hidden = HiddenModules(recording.imported)
    hidden.hide()
    yield hidden
    sys.modules.pop(name, None)


@pytest.mark.parametrize("imported", ["plain"], indirect=True)
def test_a_framework_that_compiles_nothing_is_not_marked(imported: HiddenModules) -> None:
    assert isinstance(imported.modules["plain"].f, FunctionType)
    note_what_is_compiled(imported)
    assert not imported.imported["plain"].compiled


@pytest.mark.parametrize("imported", ["compiles", "compiles_method", "compiles_static"], indirect=True)
def test_a_framework_that_compiles_is_marked(imported: HiddenModules) -> None:
    note_what_is_compiled(imported)
    assert all(each.compiled for each in imported.imported.values())


def test_the_key_of_inductor_is_computed_if_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def fails() -> None:
        computed.append("torch")
        raise OSError("no sources")

    inductor = ModuleType("torch._inductor.codecache")
    inductor.torch_key = fails  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, inductor.__name__, raising=False)
    compute_key()
    assert not computed
    monkeypatch.setitem(sys.modules, inductor.__name__, inductor)
    compute_key()
    assert computed == ["torch"]


def learned(names: Sequence[str], scenes: dict[str, Scene]) -> Learned:
    return Learned("", ("h100-80g", 8, None), {}, "", list(names), list(scenes.items()))


def test_what_is_left_out_goes_with_all_below_it() -> None:
    of_torch = ["torch", "torch.utils.cpp_extension", "torch.utils.cpp_extension_versions"]
    all_ = learned([*of_torch, "numpy", "megatron.core", "megatron.core.jit"], {})
    assert without(all_, ()) == all_
    some = without(all_, ["megatron", "torch.utils.cpp_extension"])
    assert some.modules == ["torch", "torch.utils.cpp_extension_versions", "numpy"]
    assert without(all_, ["frameworks"]).modules == of_torch


def test_the_scene_of_what_is_left_out_begins_with_the_next_module() -> None:
    first, second, third = (Scene({}, [place]) for place in ("a", "b", "c"))
    all_ = learned(["torch", "setuptools", "numpy", "scipy", "einops"], {"torch": first, "setuptools": second})
    assert without(all_, ["setuptools"]).scenes == [("torch", first), ("numpy", second)]
    all_ = learned(["torch", "setuptools", "numpy", "scipy"], {"setuptools": second, "numpy": third})
    assert without(all_, ["setuptools"]).scenes == [("numpy", third)]
