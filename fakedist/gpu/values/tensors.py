"""The tensors of an operation: those among its arguments, their storages, and questions about all of their elements.

``tensor.untyped_storage()`` makes a Python object that counts as a user of the storage. Autograd adds gradients in
place only with one user (``can_accumulate_inplace`` in torch/csrc/autograd/input_buffer.cpp), so calling it would cost
the job a tensor. Instead, identity and size come from ``c10::TensorImpl`` and ``c10::StorageImpl``, whose count gets a
weak reference. The offsets are found with tensors whose storage is known.

Questions about all elements (:func:`is_finite`, :func:`has_no_negative`, ...) take one pass.
``torch.isfinite(values).all()`` writes a mask and takes 20 times as long for half a million floats.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from contextlib import contextmanager
from typing import cast

import torch
from torch import broadcast_tensors, empty

from fakedist.errors import RecordingError
from fakedist.own_memory import read_words

Arguments = tuple[object, ...]
Keywords = dict[str, object]

#: The ``__torch_dispatch__`` of plain tensors. Wrapper subclasses have another.
PLAIN = torch.Tensor.__torch_dispatch__


def tensor_at(args: Arguments, position: int) -> torch.Tensor:
    """Return the argument at a position where the operator takes a tensor."""
    value = args[position]
    assert isinstance(value, torch.Tensor)
    return value


def as_device(value: object) -> torch.device | None:
    """The device that an argument names; None if the argument is missing."""
    if value is None:
        return None
    assert isinstance(value, (torch.device, str, int))
    return torch.device(value)


def as_generator(value: object) -> torch.Generator | None:
    """The random generator that an argument is; None if the argument is missing."""
    return value if isinstance(value, torch.Generator) else None


# isinstance of the abstract class itself takes longer than all else here.
_VALUES: type[ValuesView[object]] = type(dict[object, object]().values())


def flat(values: Iterable[object]) -> Iterator[object]:
    """All values, also those inside lists, tuples and the values of dicts."""
    for value in values:
        if isinstance(value, (list, tuple, _VALUES)):
            yield from flat(value)
        else:
            yield value


def tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """All tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def plain_tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Tensors with memory of their own: no wrappers (AsyncCollectiveTensor), none made of others (sparse)."""
    plain: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value).__torch_dispatch__ is PLAIN and value.layout is torch.strided and not value.is_nested:
                plain.append(value)
        elif isinstance(value, (list, tuple)):
            plain += plain_tensors(value)
    return plain


def device_tensors(values: Iterable[object]) -> list[torch.Tensor]:
    """Tensors of :func:`plain_tensors` that are on a device."""
    return [tensor for tensor in plain_tensors(values) if tensor.is_cuda]


def cuda_device(args: Arguments, kwargs: Keywords) -> torch.device | None:
    """The CUDA device that an operation runs on; None for the host."""
    named = as_device(kwargs.get("device"))
    if named is not None and named.type != "cuda":
        return None
    for tensor in device_tensors(args):
        return tensor.device
    if named is None:
        return None
    return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())


_PROBES = (123_457, 765_431)  # less than what counts as host memory
_WORD = 8
_MAX_WORDS = 24
#: ``c10::intrusive_ptr_target`` counts its owners in the lower half of a word, and weak references in the upper half.
_ONE_WEAK = 1 << 32
#: Arguments of the driver's functions: an address and a number of bytes.
_BYTES = (ctypes.c_void_p, ctypes.c_size_t)
#: Callbacks that were the driver's. They live as long as the process.
_callbacks: list[object] = []
#: This process's memory by words. Python's audit hooks do not see a read through it, unlike one by ``from_address``.
_memory = (ctypes.c_uint64 * (1 << 45)).from_address(0)
_free_weak_ref: Callable[[int], object] = torch.UntypedStorage._free_weak_ref


@functools.cache
def _offsets() -> tuple[int, int]:
    """Offsets in words: of the StorageImpl in a TensorImpl, and of the size in a StorageImpl."""
    layouts: list[set[tuple[int, int]]] = []
    for num_bytes in _PROBES:
        probe = empty(num_bytes, dtype=torch.uint8)
        storage = probe.untyped_storage()._cdata
        words_of_tensor, words_of_storage = read_words(probe._cdata, _MAX_WORDS), read_words(storage, _MAX_WORDS)
        in_tensor = [index for index, word in enumerate(words_of_tensor) if word == storage]
        in_storage = [index for index, word in enumerate(words_of_storage) if word == num_bytes]
        layouts.append({(first, second) for first in in_tensor for second in in_storage})
    common = set.intersection(*layouts)
    if not common:
        raise RecordingError(
            f"torch {torch.__version__} has an unknown layout of storages", "pip install torch==2.15.0"
        )
    return min(common)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Identity and bytes of a storage (``_cdata``, ``nbytes()``); zeros if sparse. RecordingError if torch differs."""
    in_tensor, in_storage = _offsets()
    storage = _memory[tensor._cdata // _WORD + in_tensor]
    return (storage, _memory[storage // _WORD + in_storage]) if storage else (0, 0)


@functools.cache
def _weak_count() -> int:
    storage = empty(_PROBES[0], dtype=torch.uint8).untyped_storage()
    before = read_words(storage._cdata, _MAX_WORDS)
    storage._weak_ref()
    after = read_words(storage._cdata, _MAX_WORDS)
    more = [new - old for old, new in zip(before, after, strict=False)]
    counted = [_WORD * index for index, count in enumerate(more) if count == _ONE_WEAK]
    _free_weak_ref(storage._cdata)
    if len(counted) != 1:
        raise RecordingError(
            f"torch {torch.__version__} counts references to storages in an unknown way", "pip install torch==2.15.0"
        )
    return counted[0]


@functools.cache
def of_driver(name: str, *arguments: type[ctypes._SimpleCData[int]]) -> Callable[..., object] | None:
    """A function of the virtual GPU's driver, which is in this process; None without one."""
    function = getattr(ctypes.PyDLL(None), name, None)  # these calls take less time than releasing the GIL would
    if function is not None:
        function.argtypes, function.restype = arguments or None, ctypes.c_size_t
    return cast("Callable[..., object] | None", function)


def hold_weakly(tensor: torch.Tensor) -> None:
    """Keep a StorageImpl, not its memory, until ``UntypedStorage._free_weak_ref``. RecordingError if torch differs."""
    add = of_driver("fakedist_add", ctypes.c_void_p, ctypes.c_uint64)
    if add is None:
        tensor.untyped_storage()._weak_ref()
    else:
        add(storage_of(tensor)[0] + _weak_count(), _ONE_WEAK)


def storage_address(tensor: torch.Tensor) -> int:
    """Start of a tensor's storage: ``untyped_storage().data_ptr()``, but faster."""
    if not tensor.numel():
        return tensor.untyped_storage().data_ptr()  # data_ptr() of a tensor without elements is 0
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


class Holding(enum.IntEnum):
    """The state of bytes, as the driver keeps it for those who read past the engine: ``enum holding`` of memory.h."""

    NOTHING = 0
    COMPUTED = 1


def report_holding(tensor: torch.Tensor, holding: Holding, flags: torch.Tensor | None = None) -> None:
    """Report to the driver what a device tensor's memory holds now; all of its storage if it is not contiguous.

    ``flags`` has one for each byte of the storage, if they differ and the tensor is not contiguous.
    """
    report = of_driver("fakedist_know", *_BYTES, ctypes.c_int)
    if report is None:
        return
    if tensor.is_contiguous():
        report(tensor.data_ptr(), tensor.numel() * tensor.element_size(), holding)
    elif flags is None:
        report(storage_address(tensor), storage_of(tensor)[1], holding)
    elif (report_flags := of_driver("fakedist_know_where", *_BYTES, ctypes.c_size_t)) is not None:
        report_flags(storage_address(tensor), flags.data_ptr(), flags.numel())


def report_taint(tensor: torch.Tensor) -> None:
    """Tell the driver that what a device tensor's memory holds is made up, or computed from made-up values."""
    if (report := of_driver("fakedist_taint", *_BYTES)) is not None:
        if tensor.is_contiguous():
            report(tensor.data_ptr(), tensor.nbytes)
        else:
            report(storage_address(tensor), storage_of(tensor)[1])


def find_know() -> Callable[[int, int, int], object]:
    """The driver's function that takes an address, a number of bytes, and what they hold."""
    return of_driver("fakedist_know", *_BYTES, ctypes.c_int) or (lambda address, num_bytes, holding: None)


def find_losses() -> ctypes.c_uint64:
    """The driver's count of blocks that kernels wrote to which no operation accounts for."""
    find = of_driver("fakedist_losses")
    return ctypes.c_uint64(0) if find is None else ctypes.c_uint64.from_address(cast("int", find()))


def find_next_loss() -> Callable[[], int]:
    """The driver's function that returns the address of one more block that such a kernel wrote to; 0 for none."""
    return cast("Callable[[], int]", of_driver("fakedist_next_loss") or (lambda: 0))


def report_kernel(function: int, writes: Sequence[bool]) -> None:
    """Tell the driver whether a kernel writes through each of its parameters."""
    if (report := of_driver("fakedist_kernel_writes", ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)) is not None:
        report(function, bytes(writes), len(writes))


def report_write(address: int) -> None:
    """Tell the driver that a kernel writes to a block that begins at an address."""
    if (report := of_driver("fakedist_write", ctypes.c_void_p)) is not None:
        report(address)


@contextmanager
def protected(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have the driver know device tensors that no kernel writes which this thread launches."""
    protect, unprotect = of_driver("fakedist_protect", *_BYTES), of_driver("fakedist_unprotect", ctypes.c_int)
    if protect is None or unprotect is None:
        yield
        return
    before = cast("int", protect(0, 0))
    for tensor in tensors:
        protect(storage_address(tensor), storage_of(tensor)[1])
    try:
        yield
    finally:
        unprotect(before)


def is_computed(tensor: torch.Tensor) -> bool:
    """Return whether a device tensor holds values from past the engine, such as another thread's copies."""
    count = of_driver("fakedist_unknown", *_BYTES) if tensor.is_contiguous() else None
    return count is not None and not count(tensor.data_ptr(), tensor.nbytes)


def find_cover() -> Callable[[int], object]:
    """The function to call when an operation whose writes the engine knows begins in this thread (1), or ends (-1)."""
    return of_driver("fakedist_cover", ctypes.c_int) or (lambda more: None)


def host_waits(device: torch.device) -> None:
    """Have the driver know that the host waits for a device's current stream, as where it reads what that computed."""
    if (wait := of_driver("fakedist_host_waits", ctypes.c_void_p)) is not None:
        wait(torch._C._cuda_getCurrentRawStream(device.index))


@contextmanager
def answered_reads() -> Iterator[None]:
    """Have the caller answer for what this thread copies to the host: the driver does not count it as made up."""
    answers = of_driver("fakedist_answers_reads", ctypes.c_int)
    if answers is None:
        yield
        return
    answers(1)
    try:
        yield
    finally:
        answers(0)


@contextmanager
def reported_reads(report: Callable[[int], bool]) -> Iterator[None]:
    """Call ``report(num_bytes)``, which returns whether the copy fails, for each copy of uncomputed bytes past the
    engine.

    It runs in the reading thread. The driver counts threads unknown to Python, which must not wait for the GIL.
    """
    set_callback = of_driver("fakedist_tell_reads", ctypes.c_void_p, ctypes.c_void_p)
    if set_callback is None:
        yield
        return
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(report)
    state = ctypes.cast(ctypes.pythonapi.PyGILState_GetThisThreadState, ctypes.c_void_p)
    set_callback(ctypes.cast(callback, ctypes.c_void_p), state)
    try:
        yield
    finally:
        set_callback(None, None)
        _callbacks.append(callback)  # a thread may be about to call it


def zero_memory(tensor: torch.Tensor) -> bool:
    """Write zeros to a contiguous device tensor without host memory for unread pages; returns whether it wrote them."""
    zero = of_driver("fakedist_zero", *_BYTES) if tensor.is_contiguous() and tensor.is_cuda else None
    return zero is not None and bool(zero(tensor.data_ptr(), tensor.nbytes))


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """A view with each element of an expanded tensor once."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [min(size, 1) if not stride else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride(), tensor.storage_offset())


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite: a NaN or an infinity shows in the sum."""
    values = distinct(values)
    if values.dtype.itemsize == 1:  # eight-bit floats have no sums
        values = values.float()
    return math.isfinite(values.sum()) or bool(torch.isfinite(values).all())  # the sum may overflow


def has_no_negative(values: torch.Tensor) -> bool:
    """Return whether every value is at least zero. NaN is not, and complex values have no order."""
    if values.is_complex():
        return False
    if not values.dtype.is_signed or not values.numel():
        return True
    values = distinct(values)
    return bool((values.float() if values.dtype.itemsize == 1 else values).min() >= 0)


def all_true(mask: torch.Tensor) -> bool:
    """Return whether no element of a mask, bools or bytes, is zero."""
    return not mask.numel() or bool(mask.view(torch.uint8).min())


def any_true(mask: torch.Tensor) -> bool:
    """Return whether any element of a mask, bools or bytes, is not zero."""
    return bool(mask.numel()) and bool(mask.view(torch.uint8).max())


def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``masked_select`` with a bool mask. For expanded values torch's own takes two copies of the mask as int64."""
    values, mask = broadcast_tensors(values, mask)
    return values[mask]
