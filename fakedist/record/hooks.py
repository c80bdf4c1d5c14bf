"""Where torch tells us that a module, a backward or an optimizer starts and ends. Each is undone on leaving."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

from fakedist.errors import RecordingError


@contextmanager
def out_of_memory_observer(observe: Callable[[int, int, int, int], None]) -> Iterator[None]:
    """Call ``observe(device, requested, total, free)`` when the allocator gives up. torch has no way to detach it."""
    watching = True

    def observer(device: int, requested: int, total: int, free: int) -> None:
        if watching:
            observe(device, requested, total, free)

    attach: Callable[[Callable[[int, int, int, int], None]], None] | None
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        raise RecordingError(
            f"torch {torch.__version__} tells nobody of running out of memory", "pip install torch==2.15.0"
        )
    attach(observer)
    try:
        yield
    finally:
        watching = False


@contextmanager
def module_hooks(begins: Callable[[nn.Module], None], ended: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``begins`` before and ``ended`` after every module's forward, also one that raises.

    ``torch.compile`` traces hooks with the modules; it must find nothing in these, so that it compiles the same graphs.
    """

    def before_forward(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            begins(module)

    def after_forward(module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            ended(module)

    before = nn_module.register_module_forward_pre_hook(before_forward)
    after = nn_module.register_module_forward_hook(after_forward, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def backward_hook(backward: Callable[[Any, bool], Any]) -> Iterator[None]:
    """Wrap every run of the autograd engine that Python starts in ``backward(outputs, creates_graph)``."""
    import torch.autograd.graph as graph

    name = "_engine_run_backward"
    for owner in (graph, torch.autograd):
        if not hasattr(owner, name):
            raise RecordingError(
                f"torch {torch.__version__} has no {owner.__name__}.{name}", "pip install torch==2.15.0"
            )
    original = graph._engine_run_backward

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        creates_graph = bool(args[2]) if len(args) > 2 else False
        with backward(outputs, creates_graph):
            return original(outputs, *args, **kwargs)

    for owner in (graph, torch.autograd):
        setattr(owner, name, run)
    try:
        yield
    finally:
        for owner in (graph, torch.autograd):
            setattr(owner, name, original)


@contextmanager
def optimizer_hooks(
    begins: Callable[[torch.optim.Optimizer], None], ended: Callable[[torch.optim.Optimizer], None]
) -> Iterator[None]:
    """Call ``begins`` before and ``ended`` after every ``optimizer.step()``; ``ended`` not where it raises."""
    before = torch_optimizer.register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: begins(optimizer))
    after = torch_optimizer.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: ended(optimizer))
    try:
        yield
    finally:
        before.remove()
        after.remove()


FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


def fsdp_is_loaded() -> bool:
    """Whether the script has imported FSDP2."""
    return FSDP_PARAM in sys.modules


@contextmanager
def fsdp_unshard_hook(unsharded: Callable[[nn.Module, torch.Tensor], None]) -> Iterator[None]:
    """Call ``unsharded(module, parameter)`` whenever FSDP2 has gathered a parameter, in forward and in backward.

    Raises:
        RecordingError: This torch's FSDP2 works otherwise, so that gathered parameters could not be told.
    """
    fsdp_param: Any = getattr(sys.modules[FSDP_PARAM], "FSDPParam", None)
    original = getattr(fsdp_param, "to_unsharded", None)
    if original is None:
        raise RecordingError(f"torch {torch.__version__} has no FSDPParam.to_unsharded", "pip install torch==2.15.0")

    def to_unsharded(self: Any) -> None:
        original(self)
        unsharded(self._module_info.module, self._unsharded_param)

    fsdp_param.to_unsharded = to_unsharded
    try:
        yield
    finally:
        fsdp_param.to_unsharded = original
