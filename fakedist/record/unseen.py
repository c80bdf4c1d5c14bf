"""Keeps the recorder's hooks out of what Dynamo traces, so that it makes the same graphs as without them.

The hooks are global: of every module and optimizer. Dynamo traces ``Module.__call__`` and ``Optimizer.step`` in place
of running them. Hooks make it skip the short way to ``Module.forward``, which ``torch.export`` needs, and it traces
them, too. So they are gone while it traces a frame, and back when it makes the frame's guards, which count the hooks
and are checked where the script runs.

Modules inside compiled code report nothing. An optimizer's step does: its compiled frame runs between two calls of
ours, or else the graph into which Dynamo traced the step with the function that called it.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from fakedist.errors import RecordingError
from fakedist.patch import patched, present, when_imported

#: Hooks of one kind, by their number.
Hooks = OrderedDict[int, object]
#: A hook that was taken out of its table: (the table, the hook's number, the hook).
Taken = tuple[Hooks, int, object]
#: Called with an optimizer.
Stepped = Callable[[torch.optim.Optimizer], None]

_CONVERT_FRAME, _TRANSLATOR = "torch._dynamo.convert_frame", "torch._dynamo.symbolic_convert"
_GRAPH, _EXPORT = "torch._dynamo.output_graph", "torch._dynamo.functional_export"
#: The name under which compiled code finds what runs an optimizer's step.
_RUN = "__fakedist_optimizer_step"
#: The attribute of Dynamo's graphs that has the optimizers whose steps are in them.
_STEPS = "fakedist_optimizers"


class Unseen:
    """The recorder's hooks, which can be hidden."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._lock, self._depth = threading.Lock(), 0
        self._taken: list[Taken] = []
        self._replaced: list[tuple[type, str, Any, Any]] = []
        self._exit = ExitStack()
        self._steps = threading.local()

    def add(self, handle: RemovableHandle) -> Callable[[], None]:
        """Hide this hook, too. Returns a function that removes the hook."""
        self._handles.append(handle)

        def remove() -> None:
            self._handles.remove(handle)
            handle.remove()

        return remove

    @contextmanager
    def replaced(self, owner: type, name: str, replacement: Any) -> Iterator[Any]:
        """Replace a method as :func:`fakedist.patch.patched` does, and hide the replacement, too."""
        with patched(owner, name, replacement) as original:
            entry = (owner, name, original, replacement)
            self._replaced.append(entry)
            try:
                yield original
            finally:
                self._replaced.remove(entry)

    def is_reported(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether compiled code has reported this optimizer's step: it leaves some frames to Python's hooks."""
        return any(optimizer is running for running in self._running)

    @property
    def _running(self) -> list[torch.optim.Optimizer]:
        running: list[torch.optim.Optimizer] = vars(self._steps).setdefault("running", [])
        return running

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the hooks out of torch's tables, and put them back at the end, before those of the script."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._taken = take(self._handles)
                for owner, name, original, _ in self._replaced:
                    setattr(owner, name, original)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    put_back(self._taken)
                    self._taken = []
                    for owner, name, _, replacement in self._replaced:
                        setattr(owner, name, replacement)

    @contextmanager
    def from_dynamo(self, begins: Stepped, ended: Stepped) -> Iterator[None]:
        """Hide the hooks while Dynamo traces, and call these before and after a compiled step of an optimizer.

        Raises:
            RecordingError: This version's Dynamo traces in another way.
        """
        watching = True

        def reported(report: Stepped) -> Stepped:  # compiled code may outlive this context
            return lambda optimizer: report(optimizer) if watching else None

        begins, ended = reported(begins), reported(ended)
        adapters: dict[str, Callable[[ModuleType], None]] = {
            _TRANSLATOR: self._translator,
            _CONVERT_FRAME: lambda module: self._convert_frame(module, self._runner(begins, ended)),
            _GRAPH: lambda module: self._exit.enter_context(_graphs_with_steps(module, begins, ended)),
            _EXPORT: self._export,
        }
        with ExitStack() as self._exit:
            self._patch(nn_module, "_has_any_global_hook")
            for name in adapters.keys() & sys.modules.keys():
                adapters[name](sys.modules[name])
            imported = when_imported(adapters.__contains__, lambda module: adapters[module.__name__](module))
            self._exit.enter_context(imported)
            try:
                yield
            finally:
                watching = False

    def _patch(self, owner: object, name: str) -> None:

        def without_hooks(*args: object, **kwargs: object) -> object:
            with self.hidden():
                return original(*args, **kwargs)

        original = self._exit.enter_context(patched(owner, name, without_hooks))

    def _runner(self, begins: Stepped, ended: Stepped) -> Callable[..., object]:
        def run(closure: FunctionType, code: CodeType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            compiled = FunctionType(code, vars(torch_optimizer), code.co_name, None, closure.__closure__)
            running = self._running
            begins(args[0])
            running.append(args[0])
            try:
                result = compiled(*args, **kwargs)
            finally:
                running.pop()
            ended(args[0])
            return result

        return run

    def _export(self, module: ModuleType) -> None:
        self._patch(module, "get_traced_fn")

    def _translator(self, module: ModuleType) -> None:
        self._patch(present(module, "InstructionTranslator"), "run")
        self._exit.enter_context(_traced_steps(present(module, "InliningInstructionTranslator")))

    def _convert_frame(self, module: ModuleType, run: Callable[..., object]) -> None:
        self._export(module)
        self._exit.callback(present(module, "register_bytecode_hook")(_around_steps()).remove)
        vars(torch_optimizer)[_RUN] = run  # it stays for the code that Dynamo has made, and then reports nothing


def take(handles: Iterable[RemovableHandle]) -> list[Taken]:
    """Take these hooks out of their tables. Returns what :func:`put_back` needs."""
    taken: list[Taken] = []
    for handle in handles:
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            hooks = cast(Hooks | None, reference())
            if hooks is not None and handle.id in hooks:
                taken.append((hooks, handle.id, hooks.pop(handle.id)))
    return taken


def put_back(taken: Sequence[Taken]) -> None:
    """Put hooks back into their tables, before those of the script."""
    for hooks, number, hook in reversed(taken):
        hooks[number] = hook
        hooks.move_to_end(number, last=False)


def compiles_backwards() -> bool:
    """Return whether torch compiles the backwards that begin now, with the hooks of their parameters."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(present(module, "compiled_autograd_enabled"))


@contextmanager
def _traced_steps(translator: Any) -> Iterator[None]:
    """Note each optimizer whose step Dynamo traces as a part of the function that calls it."""
    wrapper = _wrapper_of_steps()

    def run(self: Any) -> object:
        result = original(self)
        if self.f_code is wrapper:  # here if there was no graph break in it
            optimizer = getattr(self.symbolic_locals["args"].items[0].realize(), "value", None)
            if isinstance(optimizer, torch.optim.Optimizer):
                vars(self.output).setdefault(_STEPS, []).append(optimizer)
        return result

    with patched(translator, "run", run) as original:
        yield


@contextmanager
def _graphs_with_steps(module: ModuleType, begins: Stepped, ended: Stepped) -> Iterator[None]:
    def call_user_compiler(output: object, *args: object) -> object:
        compiled = original(output, *args)
        optimizers: list[torch.optim.Optimizer] = vars(output).pop(_STEPS, [])

        def call(*args: object) -> object:  # without the attributes by which Dynamo would find the function inside
            for optimizer in optimizers:
                begins(optimizer)
            result = compiled(*args)
            for optimizer in optimizers:
                ended(optimizer)
            return result

        return call if optimizers else compiled

    with patched(present(module, "OutputGraph"), "call_user_compiler", call_user_compiler) as original:
        yield


def _wrapper_of_steps() -> CodeType:
    wrapper: FunctionType = present(torch.optim.Optimizer, "profile_hook_step")(lambda optimizer: None)
    return wrapper.__code__


def _around_steps() -> Callable[[CodeType, CodeType], CodeType | None]:
    """A hook for ``register_bytecode_hook``: passes the code of an optimizer's step to what runs it."""
    wrapper = _wrapper_of_steps()
    evaluation = torch._C._dynamo.eval_frame
    action = evaluation._FrameAction
    template = cast(FunctionType, _template(None)).__code__

    def around(code: CodeType, compiled: CodeType) -> CodeType | None:
        if code is not wrapper:
            return None
        if compiled.co_freevars != template.co_freevars:
            raise RecordingError(
                f"torch {torch.__version__} calls optimizers in another way", "pip install torch==2.15.0"
            )
        # Dynamo only knows the code that it gets from here as its own.
        evaluation.set_code_exec_strategy(compiled, evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT))
        constants = tuple(compiled if constant == _RUN else constant for constant in template.co_consts)
        return template.replace(co_consts=constants, co_filename=compiled.co_filename, co_name=compiled.co_name)

    return around


def _template(func: object) -> object:
    def wrapper(*args: Any, **kwargs: Any) -> object:
        # Dynamo runs this in the place of the wrapper around an optimizer's step, in that one's module.
        return __fakedist_optimizer_step(lambda: func, "__fakedist_optimizer_step", args, kwargs)  # type: ignore[name-defined]  # noqa: F821

    return wrapper
