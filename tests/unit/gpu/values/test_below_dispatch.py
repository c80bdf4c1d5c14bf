"""Prints, replays of CUDA graphs, folded constants and Triton's kernels, which the dispatcher does not see."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.constant_folding import ConstantFolder
from torch.fx.experimental.proxy_tensor import make_fx

from fakedist.gpu.values import below_dispatch
from tests.support.idle_device import IdleDevice

GRAPH = torch.cuda.CUDAGraph


PTX = """
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .u64 kernel_param_1
)
{
	ld.param.b64 	%rd1, [kernel_param_1];
	st.global.b32 	[%rd1], 0;
	ret;
}
"""


class CompiledKernel:
    """As Triton's."""

    name, asm, function = "kernel", {"ptx": PTX}, None

    def _init_handles(self) -> None:
        self.function = id(self)


class StaticallyLaunchedCudaKernel:
    """As torch's: it has a handle for each device, and no PTX."""

    name, function = "kernel", None

    def load_kernel(self, device: int) -> None:
        self.functions = {device: 17 + device}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleDevice]:
    device = IdleDevice(monkeypatch)
    for name in ("capture_begin", "capture_end", "replay"):
        monkeypatch.setattr(GRAPH, name, lambda graph, *args, **kwargs: None)
    for module, loader in (
        ("triton.compiler.compiler", CompiledKernel),
        ("torch._inductor.runtime.static_triton_launcher", StaticallyLaunchedCudaKernel),
    ):
        fake: Any = SimpleNamespace(__name__=module, **{loader.__name__: loader})
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


def test_the_driver_learns_once_what_each_kernel_writes(device: IdleDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, list[bool]]] = []
    monkeypatch.setattr(below_dispatch, "report_kernel", lambda function, writes: told.append((function, writes)))
    kernel, static = CompiledKernel(), StaticallyLaunchedCudaKernel()
    for _ in range(2):
        kernel._init_handles()
    assert told == [(id(kernel), [False, True])]
    static.load_kernel(0)
    assert len(told) == 1
    static.asm = {"ptx": PTX}
    static.load_kernel(1)
    assert told[1:] == [(18, [False, True])]


def test_a_replay_takes_away_what_kernels_of_its_capture_wrote(
    device: IdleDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(below_dispatch, "report_write", written.append)
    lost, kept = torch.empty(3), torch.empty(3)
    graph, watch = GRAPH.__new__(GRAPH), device.host.watch
    graph.capture_begin()
    with device.on():
        lost.fill_(4.0)
        kept.fill_(5.0)
    watch.lost(lost.data_ptr())
    graph.capture_end()
    watch.lost(kept.data_ptr())
    graph.replay()
    assert written == [lost.data_ptr()]
    assert device.host.defined.replayed == {kept.data_ptr(): 12}
