"""Prints, replays of CUDA graphs, folded constants and Triton's kernels, which the dispatcher does not see."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.constant_folding import ConstantFolder
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.idle_device import IdleDevice

GRAPH = torch.cuda.CUDAGraph


class Autotuner:
    """As Inductor's: it says what its kernel writes."""

    mutated_arg_names = ("out",)
    fn = SimpleNamespace(arg_names=["x", "out"])

    def run(self, *args: object, **kwargs: object) -> str:
        return "ran"


class Function(Autotuner):
    """As Triton's: the source of the kernel shows it."""

    mutated_arg_names = None
    arg_names = ("x", "out")
    src = "def kernel(x, out):\n    tl.store(out, tl.load(x))\n"
    fn = SimpleNamespace(__name__="kernel")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleDevice]:
    device = IdleDevice(monkeypatch)
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(GRAPH, name, lambda graph, *args, **kwargs: None)
    for module, name, launcher in (
        ("triton.runtime.jit", "JITFunction", Function),
        ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", Autotuner),
    ):
        fake: Any = SimpleNamespace(__name__=module, **{name: launcher})
        monkeypatch.setitem(__import__("sys").modules, module, fake)
    with device.below_dispatch():
        yield device


def test_small_tensors_are_printed_with_their_values_and_large_ones_without(device: IdleDevice) -> None:
    with device.on():
        ones, unknown, large = torch.ones(2), torch.empty(2), torch.empty(1 << 20)
        parameter = torch.nn.Parameter(torch.full((2,), 7.5))
    with device.aside():
        assert repr(ones) == "tensor([1., 1.])"
        assert "7.5" in repr(parameter)
        assert device.made_up() == {}
        assert repr(unknown) == repr(unknown) != "tensor([77., 77.])"
        assert repr(large) == "tensor(..., size=(1048576,))" or "..." in repr(large)
        assert repr(device.stay(torch.zeros(1))) == "tensor([0.])"
    assert device.made_up() == {"print": 2}


def test_a_replay_restores_the_values_of_its_capture(device: IdleDevice) -> None:
    graphs, pool = [GRAPH.__new__(GRAPH) for _ in range(2)], torch.empty(3)
    for number, graph in enumerate(graphs):
        graph.capture_begin()
        with device.on():
            pool.fill_(number + 4.0)
        graph.capture_end()
    replays: list[int] = []
    device.host.watch.replayed = lambda: replays.append(1)
    with device.on():
        pool.fill_(9.0)
    for number in (0, 1, 0):
        graphs[number].replay()
        assert device.read(pool).tolist() == [number + 4.0] * 3
    seen_elsewhere = torch.empty(0).set_(pool.untyped_storage(), 0, (3,))
    assert device.host.defined.holds(seen_elsewhere)
    assert (len(replays), device.host.defined.replayed) == (3, {pool.data_ptr(): 12})
    del graph
    graphs.clear()
    assert device.host.defined.replayed == {}


def test_constants_are_folded_with_their_values(device: IdleDevice) -> None:
    def make(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2) * 3

    graph = make_fx(make)(torch.zeros(2))
    folder = ConstantFolder(graph)
    folder.run()
    folded = [value for value in folder.node_replacements.values() if isinstance(value, torch.Tensor)]
    assert any(value.tolist() == [3.0, 3.0] for value in folded)
    assert all(device.known(value) is not None for value in folded)


@pytest.mark.parametrize("launcher", [Autotuner(), Function()])
def test_kernels_of_triton_spoil_what_they_write(device: IdleDevice, launcher: Autotuner) -> None:
    with device.on():
        x, out, named = torch.ones(2), torch.ones(2), torch.ones(2)
    launcher.run(x, out, warmup=True)
    assert device.known(out) is not None
    assert launcher.run(x, out) == "ran"
    launcher.run(x, out=named)
    launcher.run(x, 5)
    assert [device.known(value) is not None for value in (x, out, named)] == [True, False, False]
