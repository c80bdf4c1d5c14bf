"""The first configuration is taken where a real GPU would be tuned for; here in stand-ins for Inductor and Triton."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from fakedist.gpu.tuning import FirstConfigurations


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


class Autotuner:
    configs = ("small", "large")

    def _bench(self, *args: Any, config: str, **meta: Any) -> list[float]:
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
        times = {config: Autotuner()._bench(config=config) for config in Autotuner.configs}
        assert min(times, key=times.__getitem__) == "small"
    assert "kernels of Inductor: 2" in tuning.notes()[0].text
    assert "kernels by coordinate descent: 1" in tuning.notes()[0].text


@pytest.mark.usefixtures("modules")
def test_where_no_configuration_compiles_the_error_is_inductors() -> None:
    with FirstConfigurations().taken(), pytest.raises(RuntimeError, match="No valid triton configs"):
        CachingAutotuner("too large", "too large")._precompile_worker()


@pytest.mark.usefixtures("modules")
def test_afterwards_tuning_is_as_it_was_and_nothing_is_noted_where_nothing_was_tuned() -> None:
    tuning = FirstConfigurations()
    with tuning.taken():
        pass
    tuner = CachingAutotuner("a", "b")
    tuner._precompile_worker()
    assert tuner.compiled == ["a", "b"]
    assert tuning.notes() == []
