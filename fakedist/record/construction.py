"""Notes the memory of parameters and buffers before a model first runs: while it is built, moved, loaded and wrapped.

A peak may lie there, and most of that memory is gone when the first forward shows the model's tensors: old copies of
moved or cast weights, a checkpoint's tensors, the whole of what FSDP then shards. So each block is noted with its
module as it comes, and marked once the module has a name.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.parameter import is_lazy

from fakedist.patch import patched, present, when_imported
from fakedist.record.compiled_graphs import is_tracing
from fakedist.record.copies import Copies
from fakedist.record.hooks import FSDP_PARAM
from fakedist.record.marker import Piece, device_pieces
from fakedist.record.marks import Marks
from fakedist.record.module_names import KEEP_LAYER, LayerTable, modules_of
from fakedist.record.position import Position
from fakedist.record.unseen import Unseen

_FLAT_PARAM = "torch.distributed.fsdp._flat_param"

#: Called with the result of an operation.
Made = Callable[[object], None]


class _Noted(NamedTuple):
    """A piece of a block, allocated by an operation up to ``op``, that holds something of a module."""

    op: int
    piece: Piece
    module: weakref.ref[nn.Module]


class Construction:
    """The memory of models that have not run.

    A function given to ``report_results`` gets the result of each operation; None ends that.
    """

    def __init__(
        self,
        position: Position,
        layers: LayerTable,
        marks: Marks,
        copies: Copies,
        report_results: Callable[[Made | None], None],
    ) -> None:
        self._position = position
        self._layers = layers
        self._marks = marks
        self._copies = copies
        self._report_results = report_results
        self._noted: list[_Noted] = []
        self._owners: dict[int, weakref.ref[nn.Module]] = {}
        self._moving = threading.local()  # modules that a thread moves, the innermost last

    @contextmanager
    def watching(self, unseen: Unseen) -> Iterator[None]:
        """Note what modules register, move, load and wrap. ``unseen`` hides the hooks from Dynamo."""
        wrappers = {_FLAT_PARAM: self._watch_fsdp1, FSDP_PARAM: self._watch_fsdp2}
        with ExitStack() as stack:

            def imported(module: ModuleType) -> None:
                stack.enter_context(wrappers[module.__name__](module))

            stack.callback(unseen.add(nn_module.register_module_parameter_registration_hook(self._registered)))
            stack.callback(unseen.add(nn_module.register_module_buffer_registration_hook(self._registered)))
            stack.enter_context(self._watch_apply(unseen))
            stack.enter_context(self._watch_loading(unseen))
            for name in wrappers.keys() & sys.modules.keys():
                imported(sys.modules[name])
            stack.enter_context(when_imported(wrappers.__contains__, imported))
            yield

    def mark(self, *, is_over: bool = False) -> None:
        """Mark what is noted of modules with known names; all, once no further module runs (``is_over``)."""
        noted, self._noted = self._noted, []
        for note in noted:
            module = note.module()
            if module is not None and (self._layers.knows(module) or (is_over and module not in self._copies.modules)):
                self._marks.mark(note.piece, "parameter", self._layers.layer(module), note.op)
            elif not is_over:
                self._noted.append(note)
            elif module is None:
                self._marks.mark(note.piece, "parameter", KEEP_LAYER, note.op)

    # ---- noting

    @property
    def _is_on(self) -> bool:
        """Return whether the script builds models now: before the first step, outside any forward and any trace."""
        position = self._position
        return position.step == 0 and position.calling() is None and not is_tracing()

    def _note(self, tensor: object, module: nn.Module) -> None:
        if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and getattr(tensor, "fake_mode", None) is None:
            for piece in device_pieces(tensor):
                self._noted.append(_Noted(self._position.op - 1, piece, weakref.ref(module)))

    def _note_own(self, module: nn.Module) -> None:
        """Note a module's own parameters and buffers. The first module that registered a tensor has it."""
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and self._first_with(tensor, module) is module:
                self._note(tensor, module)

    def _first_with(self, tensor: torch.Tensor, module: nn.Module) -> nn.Module:
        known = self._owners.get(id(tensor))
        first = None if known is None else known()
        if first is not None and any(tensor is own for own in (*first._parameters.values(), *first._buffers.values())):
            return first
        self._owners[id(tensor)] = weakref.ref(module)
        return module

    def _registered(self, module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None and self._is_on and self._first_with(tensor, module) is module:
            self._note(tensor, module)

    def _made(self, result: object) -> None:
        for module in vars(self._moving).get("modules", ())[-1:]:  # none where another thread moves some
            for tensor in result if isinstance(result, (list, tuple)) else (result,):
                self._note(tensor, module)

    # ---- what moves, loads and wraps

    @contextmanager
    def _watch_apply(self, unseen: Unseen) -> Iterator[None]:
        """Note what ``.cuda()``, ``.to()``, ``.half()`` and ``.to_empty()`` move, and all that they make."""

        def apply(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_on:
                return original(self_, *args, **kwargs)
            self._note_own(self_)
            moving = vars(self._moving).setdefault("modules", [])
            moving.append(self_)
            if len(moving) == 1:
                self._report_results(self._made)
            try:
                return original(self_, *args, **kwargs)
            finally:
                moving.pop()
                if not moving:
                    self._report_results(None)
                self._note_own(self_)

        with unseen.replaced(nn.Module, "_apply", apply) as original:
            yield

    @contextmanager
    def _watch_loading(self, unseen: Unseen) -> Iterator[None]:
        def load_state_dict(self_: nn.Module, state_dict: object, *args: Any, **kwargs: Any) -> Any:
            if isinstance(state_dict, Mapping) and self._is_on:
                modules = dict(self_.named_modules())
                for name, tensor in state_dict.items():
                    if (module := modules.get(str(name).rpartition(".")[0])) is not None:
                        self._note(tensor, module)
            return original(self_, state_dict, *args, **kwargs)

        with unseen.replaced(nn.Module, "load_state_dict", load_state_dict) as original:
            yield

    @contextmanager
    def _watch_fsdp1(self, flat_param: ModuleType) -> Iterator[None]:
        """Note the parameters that FSDP1 flattens, the flat one, and this rank's shard of it."""
        handle_class = present(flat_param, "FlatParamHandle")

        def init(handle: Any, params: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if self._is_on:
                for inner in modules_of(module):
                    self._note_own(inner)
            original(handle, params, module, *args, **kwargs)
            if self._is_on:
                views = present(handle, "_get_unflat_views")()
                for view, info in zip(views, handle.flat_param._param_infos, strict=True):
                    self._note(view, info.module)

        def shard(handle: Any) -> None:
            original_shard(handle)
            if self._is_on:
                self._note(handle.flat_param, handle._fully_sharded_module)

        with (
            patched(handle_class, "__init__", init) as original,
            patched(handle_class, "shard", shard) as original_shard,
        ):
            yield

    @contextmanager
    def _watch_fsdp2(self, fsdp_param: ModuleType) -> Iterator[None]:
        def init(param: Any, tensor: nn.Parameter, module_info: Any, *args: Any, **kwargs: Any) -> None:
            if self._is_on:
                self._note(tensor, module_info.module)
            original(param, tensor, module_info, *args, **kwargs)
            if self._is_on:
                self._note(param.sharded_param, module_info.module)

        with patched(present(fsdp_param, "FSDPParam"), "__init__", init) as original:
            yield
