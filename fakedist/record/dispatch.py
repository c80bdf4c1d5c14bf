"""Routes every operation below autograd through one function, without changing what torch does.

A ``TorchDispatchMode`` would see the same operations. But while a mode is on, ``at::isTensorSubclassLike`` takes every
tensor for a subclass, and torch computes the derivatives of indexing, masks and extremes, the sum of two gradients, a
bias and an attention mask out of place, with one more tensor each. So our function is the fallback of "Fake"
(c10/core/DispatchKey.h), a dispatch key next to "Python" that torch has but does not use. The key is switched on for
this thread, and autograd's threads inherit it.

Torch 2.11 has that key above "Python", later versions below it. Above it, the key does not see the operations that a
tensor subclass turns an operation into. No version of torch can run such a fallback while a mode is active
(``PythonKernelHolder`` in torch/csrc/utils/python_dispatch.cpp): then the key is off, and a mode of ours lies beneath
the others.
"""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import _ops, empty
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fakedist.errors import RecordingError
from fakedist.frames import OURS, script_frame
from fakedist.patch import patched, present
from fakedist.record.compiled_graphs import is_followed, is_tracing
from fakedist.record.nodes import VIEWS
from fakedist.record.numbering import FastPath

#: Runs one operation: ``run(func, args, kwargs) -> result``.
Run = Callable[[OpOverload, tuple[object, ...], dict[str, object]], object]

#: A method by which Python reads a number from a tensor.
Read = Callable[[torch.Tensor], object]
#: The ``__torch_dispatch__`` of plain tensors, whose type also appears among the types.
_PLAIN = torch.Tensor.__torch_dispatch__
_PYTHON = torch._C.DispatchKey.Python
#: Our key's name.
_FAKE = "Fake"
#: Views that ``nn.Parameter(data)`` and ``as_subclass`` take inside torch, of tensors that Python must not see yet.
_INSIDE_OF_CONSTRUCTORS = frozenset({"aten::detach", "aten::alias"})
#: Views, which allocate nothing and compute nothing. FSDP2 cuts each parameter into as many as there are ranks. Torch
#: runs them without us. What they call for a sparse or nested tensor comes to us by itself.
_VIEWS = frozenset({
    "aten::_conj", "aten::_neg_view", "aten::_reshape_alias", "aten::adjoint", "aten::as_strided",
    "aten::broadcast_to", "aten::chunk", "aten::conj", "aten::diagonal", "aten::dsplit.array", "aten::dsplit.int",
    "aten::expand", "aten::expand_as", "aten::hsplit.array", "aten::hsplit.int", "aten::imag",
    "aten::linalg_diagonal", "aten::mH", "aten::mT", "aten::matrix_H", "aten::moveaxis.int",
    "aten::moveaxis.intlist", "aten::movedim.int", "aten::movedim.intlist", "aten::narrow", "aten::numpy_T",
    "aten::permute", "aten::real", "aten::select.int", "aten::slice.Tensor", "aten::slice_inverse",
    "aten::split.Tensor", "aten::split.sizes", "aten::split_with_sizes", "aten::squeeze", "aten::squeeze.dim",
    "aten::squeeze.dims", "aten::swapaxes", "aten::swapdims", "aten::t", "aten::tensor_split.indices",
    "aten::tensor_split.sections", "aten::transpose.int", "aten::unbind.int", "aten::unflatten.int", "aten::unfold",
    "aten::unsqueeze", "aten::view", "aten::view.dtype", "aten::view_as", "aten::view_as_complex",
    "aten::view_as_real", "aten::vsplit.array", "aten::vsplit.int",
})  # fmt: skip
#: Those methods, and what each makes of the number.
_NUMBERS: dict[str, Callable[[float], float]] = {
    "__float__": float, "__int__": int, "__bool__": bool, "__index__": lambda number: operator.index(cast(int, number))
}  # fmt: skip
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


class Interception:
    """Has every operation run by a function, in threads where it is on.

    ``fallback(keyset, func, *args, **kwargs)`` is the kernel of the dispatch key. A fast path comes before it.
    ``look`` is the kernel of views that make nodes; None leaves them alone.
    """

    def __init__(
        self,
        key: DispatchKey,
        fallback: Callable[..., object],
        fast_path: FastPath | None,
        look: Callable[..., object] | None = None,
    ) -> None:
        self._key, self._fallback, self._fast_path, self._look = key, fallback, fast_path, look
        # Where the key is above "Python", a view may be a DTensor's, which redistributes it.
        is_above_python = torch._C._dispatch_keyset_full_after(key).has(_PYTHON)
        self._names = frozenset(torch._C._dispatch_get_all_op_names())
        self._views = frozenset() if is_above_python else _VIEWS & self._names
        self._threads: set[threading.Thread] = set()
        self._sees_views = False
        self._python_key = _FAKE if fast_path is None else fast_path.python_key
        self._libraries = self._of_all(self._python_key)
        self._of_views = self._passing()
        if fast_path is not None:
            fast_path.install(True)

    def this_thread(self) -> None:
        """Have the operations of this thread run by the function, too."""
        self._threads.add(threading.current_thread())
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, True)

    def unseen(self) -> AbstractContextManager[object]:
        """The context for what is not the job's: it reaches the devices' kernels alone."""
        below = torch._C._dispatch_keyset_full_after(self._key)
        guard: AbstractContextManager[object] = torch._C._ExcludeDispatchKeyGuard(
            torch._C._dispatch_keyset_full() - below
        )
        return guard

    def see_views(self, seen: bool) -> None:
        """Say whether the function also runs views. Call this while no other thread runs operations."""
        if seen == self._sees_views:
            return
        self._sees_views = seen
        self._drop_views()
        self._of_views = self._own_kernels(self._views, self._python_key, self._fallback) if seen else self._passing()

    def end(self) -> None:
        """Switch it off in this thread, and take the kernels away unless another thread needs them."""
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, False)
        if not any(thread.is_alive() for thread in self._threads - {threading.current_thread()}):
            if self._fast_path is not None:
                self._fast_path.install(False)
            self._drop_views()
            _destroy(self._libraries)

    def _passing(self) -> list[torch.library.Library]:
        """Let torch run views alone, but have the nodes noted that some of them make."""
        noted = VIEWS & self._views
        if noted and self._fast_path is not None:
            self._fast_path.watch_views(True)
        elif noted and self._look is not None:
            return [*_unseen(self._views - noted), *self._own_kernels(noted, _FAKE, self._look)]
        else:
            return _unseen(self._views)
        return _unseen(self._views - noted)

    def _drop_views(self) -> None:
        if self._fast_path is not None:
            self._fast_path.watch_views(False)
        _destroy(self._of_views)

    def _of_all(self, key: str) -> list[torch.library.Library]:
        """Make our fallback, or the fast path's, a key's kernel for all operations but views.

        Each existing operation gets its own kernel. Torch finds kernels by name alone where an argument is a tensor
        subclass whose dispatch is off (a compiler asks it for shapes), or where the key comes before tensor subclasses.
        """
        fallback = torch.library.Library("_", "IMPL")
        fallback.fallback(self._fallback, key, with_keyset=True)
        own = self._own_kernels(self._names - self._views - _INSIDE_OF_CONSTRUCTORS, key, self._fallback)
        return [fallback, *own, *_unseen(_INSIDE_OF_CONSTRUCTORS)]

    @staticmethod
    def _own_kernels(
        names: Iterable[str], key: str, kernel_of_all: Callable[..., object]
    ) -> list[torch.library.Library]:
        libraries: dict[str, torch.library.Library] = {}
        for name in names:
            kernel = _OneOperation(name, kernel_of_all)
            _library_of(name, libraries).m.impl(name, key, kernel, True)  # type: ignore[union-attr, unused-ignore]
        return list(libraries.values())


def _unseen(names: Iterable[str]) -> list[torch.library.Library]:
    libraries: dict[str, torch.library.Library] = {}
    for name in names:
        _library_of(name, libraries).impl(name, torch.library.fallthrough_kernel, _FAKE)
    return list(libraries.values())


def _library_of(name: str, libraries: dict[str, torch.library.Library]) -> torch.library.Library:
    namespace = name.partition("::")[0]
    if namespace not in libraries:
        libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return libraries[namespace]


def _destroy(libraries: Iterable[torch.library.Library]) -> None:
    for library in libraries:
        library._destroy()


@contextmanager
def every_operation(
    run: Run, fast_path: FastPath | None = None, note_view: Callable[[], None] | None = None
) -> Iterator[Interception]:
    """Have ``run`` run every operation on plain tensors that reaches a kernel in this thread or its autograd threads.

    Operations inside ``run`` are not seen, nor are those that torch traces with shapes alone, nor views as long as
    :meth:`Interception.see_views` was not called, nor those that ``fast_path`` runs. Without one,
    ``note_view()`` is called before each view that may make a node of which a backward allocates.

    Raises:
        RecordingError: This version of torch has no such dispatch key.
    """
    key = _unused_key()
    below = torch._C._dispatch_keyset_full_after(key)
    # As torch does for a mode: what `run` calls is below autograd, and modes that it enters see the operations inside.
    above = (torch._C._dispatch_keyset_full() - below).remove(_PYTHON).remove(torch._C.DispatchKey.PythonTLSSnapshot)
    beneath = _Beneath(run)
    guard = torch._C._ExcludeDispatchKeyGuard

    def fallback(keyset: torch._C.DispatchKeySet, func: OpOverload, *args: object, **kwargs: object) -> object:
        if keyset.has(_PYTHON):  # a tensor subclass, and our key is above "Python"
            with guard(above), beneath:
                return func(*args, **kwargs)
        with guard(above):
            if _is_excluded(_PYTHON):  # torch runs a kernel for its shapes
                return func(*args, **kwargs)
            try:
                result = run(func, args, kwargs)
                # Torch takes no None in a list of tensors from Python.
                return [empty(0) if tensor is None else tensor for tensor in result] if type(result) is list else result
            except torch.OutOfMemoryError as error:
                # Without us no frame would hold the arguments, and a script that catches this may need their memory.
                args, kwargs = (), {}
                raise error.with_traceback(None)  # noqa: B904

    def look(keyset: torch._C.DispatchKeySet, func: OpOverload, *args: object, **kwargs: object) -> object:
        if note_view is not None:
            note_view()
        with guard(above):
            return func(*args, **kwargs)

    interception = Interception(key, fallback, fast_path, None if note_view is None else look)
    interception.this_thread()
    try:
        with (
            _higher_order_operators_without(key),
            _beneath_others(beneath, key),
            _numbers_in_constructors(key, above, run),
        ):
            yield interception
    finally:
        interception.end()


@contextmanager
def no_operation(answered: Mapping[OpOverload, Callable[[], object]]) -> Iterator[None]:
    """Keep the key on in this thread, but let operations pass by it at no cost, but for those that are answered.

    The guards of compiled code hold still: they compare the keys that are on. A function of ``answered`` gives an
    operator's result if its first argument is on a device.
    """
    key = _unused_key()
    passing = torch.library.Library("_", "IMPL")
    passing.fallback(torch.library.fallthrough_kernel, _FAKE)
    libraries: dict[str, torch.library.Library] = {}
    for func, answer in answered.items():
        kernel = partial(_answered, func, torch._C._dispatch_keyset_full_after(key), answer)
        _library_of(func._schema.name, libraries).impl(func, kernel, _FAKE)
    torch._C._dispatch_tls_set_dispatch_key_included(key, True)
    try:
        with _higher_order_operators_without(key):
            yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        _destroy([passing, *libraries.values()])


def _answered(
    func: OpOverload, below: torch._C.DispatchKeySet, answer: Callable[[], object], *args: object, **kwargs: object
) -> object:
    with torch._C._ExcludeDispatchKeyGuard(torch._C._dispatch_keyset_full() - below):
        if isinstance(args[0], torch.Tensor) and args[0].is_cuda:
            return answer()
        return func(*args, **kwargs)


class _OneOperation:
    def __init__(self, name: str, fallback: Callable[..., object]) -> None:
        self._name, self._fallback = name, fallback
        self._func: OpOverload | None = None

    def __call__(self, keyset: torch._C.DispatchKeySet, *args: object, **kwargs: object) -> object:
        if self._func is None:
            namespace, _, name = self._name.partition("::")
            packet, _, overload = name.partition(".")
            self._func = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        try:
            return self._fallback(keyset, self._func, *args, **kwargs)
        finally:
            args, kwargs = (), {}  # a traceback keeps this frame alive


class _Beneath(TorchDispatchMode):
    """A mode beneath the script's modes. It runs what they and tensor subclasses leave of an operation."""

    #: Torch reads this: higher-order operators, such as the one for DTensor's random numbers, come here too.
    supports_higher_order_operators = True

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._run = run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run unchanged. Their kernels are not operations."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type[torch.Tensor]],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run one operation, after tensor subclasses have turned it into operations on plain tensors."""
        if is_tracing():
            # DTensor asks a FakeTensorMode for shapes. That mode is below this one whenever it was entered, so pass on.
            return func(*args, **(kwargs or {}))
        if is_followed() or isinstance(func, HigherOrderOperator):
            return self._as_without_modes(func, args, kwargs or {})
        if types and any(t.__torch_dispatch__ is not _PLAIN for t in types):
            return NotImplemented
        return self._run(func, args, kwargs or {})

    @staticmethod
    def _as_without_modes(
        func: OpOverload | HigherOrderOperator, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Run one operation by the key, as without an active mode.

        Torch's own modes that record operations, such as ``make_fx``, are below this one. What they leave of it comes
        by the key, as do the operations inside an operator that runs operators.
        """
        key = _unused_key()
        torch._C._dispatch_tls_set_dispatch_key_included(key, True)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(key, False)


@contextmanager
def _beneath_others(beneath: _Beneath, key: DispatchKey) -> Iterator[None]:
    """While a thread with the key is in a mode of other code, keep ``beneath`` beneath it and the key off."""
    is_on, switch = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._dispatch_tls_set_dispatch_key_included
    threads = threading.local()

    def enter_(mode: TorchDispatchMode) -> object:
        entered = threads.__dict__.setdefault("entered", [])
        first = is_on(key) and not _is_excluded(key)
        entered.append(first)
        if first:
            switch(key, False)
            enter(beneath)
        return enter(mode)

    def leave_(mode: TorchDispatchMode, *error: object) -> None:
        leave(mode, *error)
        if threads.__dict__.get("entered") and threads.entered.pop():
            leave(beneath, None, None, None)
            switch(key, True)

    with (
        patched(TorchDispatchMode, "__enter__", enter_) as enter,
        patched(TorchDispatchMode, "__exit__", leave_) as leave,
    ):
        yield


def _unused_key() -> DispatchKey:
    try:
        key: DispatchKey = present(torch._C, "_parse_dispatch_key")(_FAKE)
    except RuntimeError as error:
        raise RecordingError(
            f"torch {torch.__version__} has no dispatch key of its own that is free to use", "pip install torch==2.15.0"
        ) from error
    return key


@contextmanager
def _higher_order_operators_without(key: DispatchKey) -> Iterator[None]:
    """Hide our key from higher-order operators, which choose kernels in Python and have none for it.

    Nothing is patched that Dynamo would trace.

    Raises:
        RecordingError: In this version of torch they choose it in another way.
    """
    passed_by = present(_ops, "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS")
    operators = present(_ops, "_higher_order_ops")
    passed_by.append(key)  # for those that are yet to be made
    for operator_ in operators.values():
        operator_.fallthrough(key)
    try:
        yield
    finally:
        passed_by.remove(key)
        for operator_ in operators.values():
            operator_.non_fallthrough_keys = operator_.non_fallthrough_keys.add(key)


@contextmanager
def _numbers_in_constructors(key: DispatchKey, above: torch._C.DispatchKeySet, run: Run) -> Iterator[None]:
    """Run the reads of scalars by ``torch.tensor([scalar, ...])``, during which torch turns the key off.

    torch/csrc/utils/tensor_new.cpp excludes the key together with "Python".
    """
    is_on, guard = torch._C._dispatch_tls_is_dispatch_key_included, torch._C._ExcludeDispatchKeyGuard
    one_value = torch.ops.aten._local_scalar_dense.default

    def reads(original: Read, kind: Callable[[float], float]) -> Read:
        def number(self: torch.Tensor) -> object:
            if _is_excluded(key) and _is_excluded(_PYTHON) and is_on(key) and self.is_cuda and self.numel() == 1:
                with guard(above):
                    return kind(cast(float, run(one_value, (self,), {})))
            return original(self)

        return number

    originals = {name: present(torch.Tensor, name) for name in _NUMBERS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, reads(original, _NUMBERS[name]))
    try:
        yield
    finally:
        for name in originals:  # the originals are inherited
            delattr(torch.Tensor, name)


@contextmanager
def warnings_at_the_script() -> Iterator[None]:
    """Show a warning at the script's running line, not in the recorder's dispatch mode, where torch's C++ puts it."""
    original: Callable[..., None] = warnings.showwarning

    def showwarning(message: Any, category: Any, filename: str, lineno: int, *more: Any, **named: Any) -> None:
        if filename.startswith(OURS) and (frame := script_frame()) is not None:
            filename, lineno = frame.f_code.co_filename, frame.f_lineno
        original(message, category, filename, lineno, *more, **named)

    with patched(warnings, "showwarning", showwarning):
        yield
