"""Hooks that report where modules, backwards and optimizers start and end. Leaving each context removes its hooks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.variable import Variable
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

from fakedist.patch import patched, present
from fakedist.record.unseen import Unseen

_ENGINE = "_execution_engine"
#: Functions that call modules' hooks, and how far above they may be.
_CALLERS, _MOST_FRAMES = ("inner", "_call_impl", "call"), 8
_get_trace, _set_trace = present(torch._C, "_get_tracing_state"), present(torch._C, "_set_tracing_state")


@contextmanager
def out_of_memory_observer(observe: Callable[[int, int, int, int], None]) -> Iterator[Callable[[], None]]:
    """Yield a function that attaches ``observe(device, requested, total, free)`` to out-of-memory errors.

    Attaching initialises CUDA, so call it once CUDA is initialised. Torch cannot detach the observer: leaving the
    context only silences it.
    """
    watching = True
    attach = present(torch._C, "_cuda_attach_out_of_memory_observer")

    def observer(device: int, requested: int, total: int, free: int) -> None:
        if watching:
            observe(device, requested, total, free)

    try:
        yield lambda: attach(observer)
    finally:
        watching = False


def _beside_trace(report: Callable[..., None], *args: object) -> None:
    """While ``torch.jit.trace`` runs a model, keep what we ask of tensors out of the graph that it writes."""
    state = _get_trace()
    if state is None:
        report(*args)
        return
    _set_trace(None)
    try:
        report(*args)
    finally:
        _set_trace(state)


def keyword_arguments(module: nn.Module) -> dict[str, object]:
    """The keyword arguments of the running call of a module, from a frame of ``nn.Module._call_impl``, else empty."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name in _CALLERS:
            known = frame.f_locals
            if known.get("self", known.get("module")) is module and isinstance(kwargs := known.get("kwargs"), dict):
                return kwargs
        frame = frame.f_back
    return {}


@contextmanager
def module_hooks(
    begins: Callable[[nn.Module, tuple[object, ...]], None],
    ended: Callable[[nn.Module], None],
    unseen: Unseen,
    still: Callable[[Callable[..., None]], Callable[..., None]] = lambda function: function,
) -> Iterator[None]:
    """Call ``begins`` (with the positional arguments) before and ``ended`` after every forward, even one that raises.

    ``still(hook)`` is what torch calls instead of each of the two hooks.

    ``torch.compile`` does not see these hooks, so it compiles the same graphs, which do not call them.
    ``module.compile()`` compiles the hooks with the module, so its calls are reported from outside the compiled code.
    """
    watching = True

    def before_forward(module: nn.Module, args: tuple[object, ...]) -> None:
        if not torch.compiler.is_compiling():
            _beside_trace(begins, module, args)

    def after_forward(module: nn.Module, args: object, result: object) -> None:
        if not torch.compiler.is_compiling():
            _beside_trace(ended, module)

    def compile_(module: nn.Module, *args: object, **kwargs: object) -> None:
        original(module, *args, **kwargs)
        compiled = present(module, "_compiled_call_impl")

        def call(*args: object, **kwargs: object) -> object:
            if not watching:
                return compiled(*args, **kwargs)
            before_forward(module, args)
            try:
                return compiled(*args, **kwargs)
            finally:
                after_forward(module, args, None)

        module._compiled_call_impl = call

    remove_before = unseen.add(nn_module.register_module_forward_pre_hook(still(before_forward)))
    remove_after = unseen.add(nn_module.register_module_forward_hook(still(after_forward), always_call=True))
    try:
        with patched(nn.Module, "compile", compile_) as original:
            yield
    finally:
        watching = False
        remove_before()
        remove_after()


@contextmanager
def backward_hook(begins: Callable[[bool, Sequence[object]], bool], ended: Callable[[], None]) -> Iterator[None]:
    """Call ``begins(creates_graph, roots)`` before every backward that Python starts, and if true ``ended`` after it.

    The hook is on the autograd engine, because some callers (Megatron) bypass ``torch.autograd``.
    """
    engine: Any = type(present(Variable, _ENGINE))  # a class that only this torch knows

    class WatchedEngine(engine):  # type: ignore[misc]
        """The engine. ``torch.compile`` looks for an instance of its class."""

        def run_backward(
            self,
            tensors: Sequence[object],
            grad_tensors: object,
            keep_graph: bool,
            create_graph: bool,
            *args: object,
            **kwargs: object,
        ) -> object:
            reported = begins(create_graph, tensors)
            try:
                return super().run_backward(tensors, grad_tensors, keep_graph, create_graph, *args, **kwargs)
            finally:
                if reported:
                    ended()

    with patched(Variable, _ENGINE, WatchedEngine()):
        yield


@contextmanager
def optimizer_hooks(
    begins: Callable[[torch.optim.Optimizer], None], ended: Callable[[torch.optim.Optimizer], None], unseen: Unseen
) -> Iterator[None]:
    """Call ``begins`` before and ``ended`` after every ``optimizer.step()``. A step that raises skips ``ended``."""

    def before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not unseen.is_reported(optimizer):
            begins(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not unseen.is_reported(optimizer):
            ended(optimizer)

    with ExitStack() as stack:
        stack.callback(unseen.add(torch_optimizer.register_optimizer_step_pre_hook(before_step)))
        stack.callback(unseen.add(torch_optimizer.register_optimizer_step_post_hook(after_step)))
        stack.enter_context(unseen.from_dynamo(begins, ended))
        yield


@contextmanager
def made_optimizers(made: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call ``made`` with every optimizer that is made, once it has its parameters."""

    @functools.wraps(present(torch.optim.Optimizer, "__init__"))
    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made(self)

    with patched(torch.optim.Optimizer, "__init__", init) as original:
        yield


@contextmanager
def tensor_swaps(released: Callable[[torch.Tensor, torch.Tensor], AbstractContextManager[None]]) -> Iterator[None]:
    """Swap the contents of two tensors, as ``nn.Module.to()`` does DTensors', in ``released(first, second)``.

    ``swap_tensors`` refuses weak references.
    """

    def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
        with released(t1, t2):
            original(t1, t2)

    with patched(torch.utils, "swap_tensors", swap_tensors) as original:
        yield


FSDP_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"


def fsdp_is_loaded() -> bool:
    """Return whether the script has imported FSDP2."""
    return FSDP_PARAM in sys.modules


@contextmanager
def fsdp_unshard_hook(unsharded: Callable[[nn.Module, torch.Tensor], None]) -> Iterator[None]:
    """Call ``unsharded(module, parameter)`` whenever FSDP2 has gathered a parameter, in forward and in backward.

    Raises:
        RecordingError: This version's FSDP2 works in another way, so gathered parameters could not be reported.
    """
    fsdp_param = present(sys.modules[FSDP_PARAM], "FSDPParam")
    original = present(fsdp_param, "to_unsharded")

    def to_unsharded(self: Any) -> None:  # FSDP2's own class, which is not importable everywhere
        original(self)
        unsharded(self._module_info.module, self._unsharded_param)

    with patched(fsdp_param, "to_unsharded", to_unsharded):
        yield
