"""Tuning takes the first configuration, and Triton's key is kept; in stand-ins for Inductor and Triton."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakedist.gpu.tuning import FirstConfigurations, kept_triton_key


class CachingAutotuner:
    def __init__(self, *configs: str) -> None:
        self.configs: list[str] | None = list(configs)
        self.compile_results: list[str] = []
        self.compiled: list[str] = []
        self.launchers: list[str] = []

    def _precompile_worker(self) -> None:
        for config in self.configs or ():
            self.compiled.append(config)
        self.compile_results = [config for config in self.compiled if config != "too large"]
        if not self.compile_results:
            raise RuntimeError("No valid triton configs")

    def benchmark_all_configs(self) -> Any:
        raise AssertionError("a benchmark ran")

    def coordinate_descent_tuning(self, launcher: str, *args: Any) -> str:
        raise AssertionError("coordinates were tried")


class Config:
    def __init__(self, block: int) -> None:
        self.block = block

    def all_kwargs(self) -> dict[str, int]:
        return {"block": self.block}


class Compiled:
    def __init__(self, block: int) -> None:
        self.block = block

    def _init_handles(self) -> None:
        if self.block > 64:
            raise RuntimeError("out of resource: shared memory")


class Function:
    def __init__(self) -> None:
        self.compiled: list[int] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, block: int) -> Compiled:
        assert (args, grid, warmup) == (("x", "y"), (1,), True), "a kernel was launched"
        self.compiled.append(block)
        return Compiled(block)


class Autotuner:
    def __init__(self, *blocks: int) -> None:
        self.configs, self.fn = [Config(block) for block in blocks], Function()
        self.nargs = {"x_ptr": "x", "y_ptr": "y"}

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Config]:
        return [config for config in self.configs if config.block != 1]

    def _bench(self, *args: Any, config: Config, **meta: Any) -> list[float]:
        raise AssertionError("a benchmark ran")


class AlgorithmSelectorCache:
    def __call__(self, name: str, choices: list[str], layout: str = "") -> list[str]:
        return choices


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cls in (
        ("torch._inductor.runtime.triton_heuristics", CachingAutotuner),
        ("torch._inductor.select_algorithm", AlgorithmSelectorCache),
        ("triton.runtime.autotuner", Autotuner),
    ):
        module = ModuleType(name)
        setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("modules")
def test_the_first_configuration_that_compiles_is_taken_and_the_others_are_not_compiled() -> None:
    tuning = FirstConfigurations()
    with tuning.taken():
        tuner, picky, plain = CachingAutotuner("a", "b"), CachingAutotuner("too large", "b", "c"), CachingAutotuner("a")
        for each in (tuner, picky, plain):
            each._precompile_worker()
        assert (tuner.compiled, picky.compile_results, plain.compiled) == (["a"], ["b"], ["a"])
        assert tuner.coordinate_descent_tuning("a") == "a"
        tuner.launchers = ["a", "scaled"]
        timings: dict[str, float] = tuner.benchmark_all_configs()
        assert min(timings, key=timings.__getitem__) == "a"
        assert AlgorithmSelectorCache()("mm", ["aten", "template"], layout="l") == ["aten"]
    assert "kernels of Inductor: 2" in tuning.notes()[0].text
    assert "kernels by coordinate descent: 1" in tuning.notes()[0].text


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(
    ("blocks", "compiled", "taken"),
    [
        ((1, 256, 128, 64, 32), [256, 128, 64], 64),  # 1 was pruned
        ((256, 128), [256, 128], 128),  # its launch raises what Triton's does
        ((256,), [], 256),
    ],
)
def test_of_tritons_configurations_the_first_is_taken_that_the_gpu_has_room_for(
    blocks: tuple[int, ...], compiled: list[int], taken: int
) -> None:
    tuning, tuner = FirstConfigurations(), Autotuner(*blocks)
    with tuning.taken():
        assert [config.block for config in tuner.prune_configs({"grid": (1,), "warmup": False})] == [taken]
        assert tuner._bench(config=tuner.configs[0]) == [0.0] * 3
    assert tuner.fn.compiled == compiled
    assert ["kernels of triton.autotune: 1" in note.text for note in tuning.notes()] == [True] * bool(compiled)


@pytest.mark.usefixtures("modules")
def test_where_no_configuration_compiles_the_error_is_inductors_and_afterwards_tuning_is_as_it_was() -> None:
    tuning = FirstConfigurations()
    with tuning.taken(), pytest.raises(RuntimeError, match="No valid triton configs"):
        CachingAutotuner("too large", "too large")._precompile_worker()
    tuner = CachingAutotuner("a", "b")
    tuner._precompile_worker()
    assert tuner.compiled == ["a", "b"]
    assert FirstConfigurations().notes() == []


_CACHE = """
from pathlib import Path
counted = []
def triton_key():
    counted.append(1)
    return (Path(__file__).parents[1] / "library.so").read_text()
"""


@pytest.fixture
def triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "triton"
    (place / "runtime").mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "runtime" / "__init__.py").touch()
    (place / "runtime" / "cache.py").write_text(_CACHE)
    (place / "library.so").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = _without_triton()
    yield place
    _without_triton()
    sys.modules.update(kept)


def _without_triton() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == "triton"]
    return {name: sys.modules.pop(name) for name in names}


def key(directory: Path) -> tuple[str, bool]:
    """The key in a process of its own, and whether it was computed there."""
    _without_triton()
    with kept_triton_key(directory):
        cache = importlib.import_module("triton.runtime.cache")
        found = [cache.triton_key() for _ in range(2)]
    assert found[0] == found[1]
    assert len(cache.counted) <= 1
    return found[0], bool(cache.counted)


def test_a_key_is_computed_once_for_all_processes_and_anew_for_another_file(tmp_path: Path, triton: Path) -> None:
    assert [key(tmp_path / "keys") for _ in range(2)] == [("one", True), ("one", False)]
    (triton / "library.so").write_text("two")  # of the same size
    os.utime(triton / "library.so", ns=(0, 0))
    assert key(tmp_path / "keys") == ("two", True)


@pytest.mark.usefixtures("triton")
def test_an_empty_file_and_a_place_that_takes_none_are_no_keys(tmp_path: Path) -> None:
    key(tmp_path / "keys")
    (kept,) = (tmp_path / "keys").iterdir()
    kept.write_text("")
    (tmp_path / "file").touch()
    assert [key(tmp_path / name) for name in ("keys", "file")] == [("one", True)] * 2


def test_a_file_that_cannot_be_looked_at_has_the_key_computed(tmp_path: Path, triton: Path) -> None:
    (triton / ".#driver.py").symlink_to("/nowhere/driver.py")
    assert [key(tmp_path / "keys") for _ in range(2)] == [("one", True)] * 2
