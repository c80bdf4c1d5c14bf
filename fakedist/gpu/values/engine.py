"""The value engine: runs every operation on the virtual GPU, and small ones on the host too.

On the virtual GPU an operation allocates its memory and computes nothing. If all its inputs are small and hold values,
PyTorch's CPU kernels run it again over the same memory, and the result lands where the script will read it. Values that
the script reads but no kernel computed are made up (:mod:`fakedist.gpu.values.inventions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import empty
from torch import tensor as new_tensor

from fakedist.gpu.values.choices import CHOOSING, choose
from fakedist.gpu.values.composites import Composites
from fakedist.gpu.values.contents import LIMIT_BYTES, MASK_LIMIT_BYTES, host_view, is_small
from fakedist.gpu.values.following import Following
from fakedist.gpu.values.foreach import Foreach
from fakedist.gpu.values.graphs import replays
from fakedist.gpu.values.hollow import Hollow, is_hollow
from fakedist.gpu.values.host import Host, device_tensors, plain_tensors
from fakedist.gpu.values.inside import Inside
from fakedist.gpu.values.kinds import Kind
from fakedist.gpu.values.randoms import Randoms
from fakedist.gpu.values.reading import INDEXING, READS, Reading
from fakedist.gpu.values.routers import routed_share
from fakedist.gpu.values.storage import storage_of

#: glibc takes larger blocks from the kernel, which zeroes them (M_MMAP_THRESHOLD's largest value).
_FRESH_BYTES = 32 << 20
#: For these a share is the answer itself. For others it is only remembered.
_COUNTED = {"sum", "count_nonzero", "mean"}
_Arguments = tuple[Any, ...]
_Keywords = dict[str, Any]


class ValueEngine:
    """Gives the script's small tensors their values.

    Args:
        seed: Seed of random numbers and of made-up values.
        strict: Raise InventedValueError instead of making up a value.
    """

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self._routes: dict[Any, Callable[..., Any]] = {}
        self._host = Host(seed, strict=strict)
        self._randoms = Randoms(seed)
        self._reading = Reading(self._host)
        self._foreach = Foreach(self._host)
        self._following = Following(self._host)
        self._hollow = Hollow(self._host)
        self._inside = Inside(self.execute)
        self._composites = Composites(self._host, self._inside.run, self._kernel)

    def execute(self, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """Run one operation and return what the device operation returned."""
        route = self._routes.get(func)
        if route is None:
            route = self._routes[func] = self._route(func)
        return route(func, args, kwargs)

    def replays(self) -> AbstractContextManager[None]:
        """Make CUDA graphs write their values again when they are replayed."""
        return replays(self._host.defined)

    def is_undefined(self, tensor: torch.Tensor) -> bool:
        """Whether a device tensor lacks values: it is large, or no kernel computed it."""
        return tensor.is_cuda and not self._host.holds(tensor)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A small device tensor's values, with missing ones made up; None for a large tensor."""
        return self._host.settle(tensor.detach(), "print") if is_small(tensor) else None

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A plain tensor's values, over the same memory; None if kernels did not compute all of them and the script
        did not read them.
        """
        if not tensor.is_cuda:
            return None if is_hollow(tensor) else tensor
        if not self._host.holds(tensor):
            return None
        doubt = self._host.doubts.of(tensor)
        return host_view(tensor.detach()) if doubt is None or doubt.teller else None

    def invented(self) -> list[tuple[str, str, int, int, int]]:
        """Values made up since the last call: (operation, filename, line, calls, values)."""
        return self._host.inventions.take()

    def branches(self) -> str:
        """The report's note on decisions of the script that depend on made-up values; empty without any."""
        return self._host.inventions.branches()

    def not_computed_on_host(self) -> tuple[int, str]:
        """How many operations on large host floats were not computed, and ``file:line`` of the first; empty if that
        was in a backward.
        """
        filename, line = self._hollow.first_line
        return self._hollow.operations, f"{filename}:{line}" if filename else ""

    def _route(self, func: Any) -> Callable[..., Any]:
        """Return the function that runs an operation, by its kind."""
        kind = Kind(func)
        if kind.name == "empty":
            return self._empty
        if (route := self._composites.route(kind)) is not None:
            return route
        if kind.is_view or kind.empty:
            return _plainly
        if not kind.is_kernel:
            return self._inside.run
        if kind.name in ("lift_fresh", "lift"):
            return self._lifted
        if kind.name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach")):
            return partial(self._listed, kind)
        special = {"copy_": self._copied_into, "_to_copy": self._copied}.get(kind.name)
        if special is None:
            reads = kind.dynamic or kind.name in READS
            special = self._indexed if kind.name in INDEXING else self._read if reads else self._kernel
        return partial(special, kind)

    # ---- ways to run an operation

    def _empty(self, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """New memory holds nothing, unless its future contents are known."""
        result = func(*args, **kwargs)
        if kwargs.get("dtype") is torch.bool and result.is_cuda and (share := routed_share(result)) is not None:
            self._host.shares.know(result, share)
        return result

    def _kernel(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """Any operation that only writes device memory. Nearly all operations take this path."""
        if self._hollow.concerns(kind, args, kwargs) and not _is_upload(kind, args, kwargs):
            return self._hollow.run(kind, func, args, kwargs)
        if not kind.like:
            for value in args:
                if isinstance(value, torch.Tensor):
                    if value.layout is not torch.strided or value.is_nested:
                        return func(*args, **kwargs)
                    if value.nbytes > LIMIT_BYTES and _is_large(value):
                        return self._not_computed(kind, func, args, kwargs)
                elif isinstance(value, (list, tuple)) and _any_large(value):
                    return self._not_computed(kind, func, args, kwargs)
        if not self._following.complete(kind, self._inputs(kind, args, kwargs)):
            return self._not_computed(kind, func, args, kwargs)
        if self._following.routes(kind, args):
            return self._following.route(kind, func, args, kwargs)
        return self._computed(kind, func, args, kwargs)

    def _computed(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """Run on the device, and on the host over the same memory."""
        device, generator, place = None, kwargs.get("generator"), (0, 0)
        if kind.random:
            device = _device(args, kwargs)
            place = self._randoms.place(device, generator) if device is not None else place
        doubt = self._host.doubt(self._inputs(kind, args, kwargs))
        result = func(*args, **kwargs)
        outputs = list(device_tensors((result,)))
        written = self._written(kind, args, kwargs) if kind.written else []
        if not outputs and not written:
            return result  # an operation of the host alone
        if not all(is_small(tensor) for tensor in outputs):
            self._holds_nothing(kind, args, result, written)
            return result
        given = args
        if kind.like:
            args = (empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        values = self._on_host(kind, func, (args, kwargs), place if device is not None else None)
        if values is None:
            self._holds_nothing(kind, args, result, written)
        elif written:
            for tensor in written:
                self._host.defined.define(tensor)
                if doubt is None:
                    self._host.doubts.clear(tensor)
                    self._host.shares.forget(tensor)
        else:
            for output, host in zip(outputs, values, strict=False):
                if host.shape == output.shape and 0 not in output.stride():  # expanded: a view of an argument
                    self._host.write(output, host)
        if doubt is not None and values is not None:
            self._following.mark(kind, given, written or outputs, doubt)
        return result

    def _not_computed(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """Run on the device alone."""
        result = func(*args, **kwargs)
        if kind.followed or kind.written or kind.name in CHOOSING:
            written = self._written(kind, args, kwargs) if kind.written else []
            if kind.name in CHOOSING and not written:
                self._choose(kind, args, kwargs, result)
            self._holds_nothing(kind, args, result, written)
        if isinstance(result, torch.Tensor) and result.numel() == 1 and _is_loss(result, args):
            self._host.shares.know_non_negative(result)
        return result

    def _listed(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """An operation on lists of tensors."""
        run = self._hollow.run if self._hollow.concerns(kind, args, kwargs) else self._foreach.run
        return run(kind, func, args, kwargs)

    def _lifted(self, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """``torch.tensor(list, device="cuda")`` copies below the dispatcher. This is the only operation visible."""
        result = func(*args, **kwargs)
        if result.is_cuda and is_small(result):
            self._host.defined.define(result)
        return result

    def _read(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        device = _device(args, {})
        if device is None:
            if kind.name == "_local_scalar_dense" and is_hollow(args[0]):
                return func(self._hollow.take_element(args[0], kind.full_name))
            return func(*args, **kwargs)
        if not kind.takes_generator:
            return self._reading.answer(kind, func, args, kwargs)
        place = self._randoms.place(device, kwargs.get("generator"))
        self._randoms.advance(device, kwargs.get("generator"))
        return self._reading.answer(kind, func, args, kwargs | {"generator": self._randoms.generator(place)})

    def _indexed(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        if args[0].is_cuda:
            args = self._reading.indices(kind, args)
        return self._kernel(kind, func, args, kwargs)

    def _copied(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """``_to_copy``: to another dtype, or between host and device."""
        source = args[0]
        target = kwargs.get("device")
        to_host = target is not None and torch.device(target).type == "cpu"
        if not source.is_cuda or not to_host:
            return self._kernel(kind, func, args, kwargs)
        if is_small(source):
            return func(self._host.settle(source, kind.full_name), **kwargs)
        result = func(*args, **kwargs)
        self._dropped(kind, source, result, fresh=True)
        return result

    def _copied_into(self, kind: Kind, func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
        """``copy_``, within the device or between it and the host."""
        target, source = args[:2]
        if target.is_cuda or not source.is_cuda:
            return self._kernel(kind, func, args, kwargs)
        if is_small(source):
            return func(target, self._host.settle(source, kind.full_name), *args[2:], **kwargs)
        result = func(*args, **kwargs)
        self._dropped(kind, source, result, fresh=False)
        return result

    # ---- what happens to the values

    def _on_host(self, kind: Kind, func: Any, given: tuple[_Arguments, _Keywords], place: Any) -> Any:
        """Return what the CPU kernels compute over the same memory, as a list; None if they cannot.

        If ``place`` is given, random numbers come from that seed and offset.
        """
        args, kwargs = self._host.arguments(given[0]), self._host.keywords(given[1])
        drawing: Any = nullcontext()
        if place is not None and kind.takes_generator:
            kwargs["generator"] = self._randoms.generator(place)
        elif place is not None:
            drawing = self._randoms.as_default(place)
        try:
            with drawing:
                return list(plain_tensors((func(*args, **kwargs),)))
        except Exception:  # no CPU kernel, or none for these types: the result holds nothing
            return None

    def _holds_nothing(self, kind: Kind, args: _Arguments, result: Any, written: list[torch.Tensor]) -> None:
        """The values are not computed. Keep what else is known about the result."""
        shares = self._host.shares
        if isinstance(result, tuple) and result:
            result = result[0]  # a loss comes with its total weight, an extreme with its index
        known = kind.followed and isinstance(result, torch.Tensor) and result.is_cuda
        if known and written:
            known = result.nbytes >= storage_of(result)[1]  # else only part of it was written
        share = shares.follow(kind.name, args, result) if known else None
        for tensor in written:
            if is_small(tensor):
                self._host.defined.spoil(tensor)
            if not known:
                shares.forget(tensor)
        if share is None or not is_small(result) or result.is_complex():
            return
        constant = share in (0.0, 1.0) and kind.name not in _COUNTED
        if constant or (kind.name in _COUNTED and result.dtype != torch.bool):
            whole = not result.is_floating_point()
            if not constant and shares.of(args[0]) not in (0.0, 1.0):
                self._host.inventions.count(kind.full_name, result.numel())
            self._host.write(result, new_tensor(round(share) if whole else share))

    def _choose(self, kind: Kind, args: _Arguments, kwargs: _Keywords, result: Any) -> None:
        for tensor in device_tensors((result,)):
            if tensor.dtype == torch.int64 and (tensor is result or tensor is result[-1]) and is_small(tensor):
                if tensor is result and kind.name not in ("argmax", "argmin", "argsort"):
                    continue  # max() of integers
                self._host.inventions.count(kind.full_name, tensor.numel())
                self._host.write(tensor, choose(kind, args, kwargs, tensor))

    def _dropped(self, kind: Kind, source: torch.Tensor, result: torch.Tensor, *, fresh: bool) -> None:
        """A large tensor came to the host. It gets the known values, else made-up floats, or zeros for integers."""
        if is_hollow(result):
            self._hollow.count()
            return
        share = self._host.shares.of(source)
        if share == 1.0:
            result.fill_(1)
        elif share != 0.0 and (result.is_floating_point() or result.is_complex()):
            non_negative = self._host.shares.is_non_negative(source)
            self._host.inventions.draw(result, source, kind.full_name, non_negative=non_negative)
            return
        elif storage_of(result)[1] <= _FRESH_BYTES:
            result.zero_()
        if share not in (0.0, 1.0):
            self._host.inventions.count(kind.full_name, source.numel())

    def _inputs(self, kind: Kind, args: _Arguments, kwargs: _Keywords) -> Iterable[torch.Tensor]:
        """Tensors whose values the result depends on."""
        if kind.like:
            return plain_tensors(args[1:])
        if not (kind.overwrites and kind.written):
            return plain_tensors((args, tuple(kwargs.values())))
        read = [value for index, value in enumerate(args) if index not in kind.written]
        named = [value for name, value in kwargs.items() if name not in kind.written_names]
        return plain_tensors((read, named))

    def _written(self, kind: Kind, args: _Arguments, kwargs: _Keywords) -> list[torch.Tensor]:
        values = [args[index] for index in kind.written if index < len(args)]
        values += [value for name, value in kwargs.items() if name in kind.written_names]
        return list(device_tensors(values))


def _plainly(func: Any, args: _Arguments, kwargs: _Keywords) -> Any:
    return func(*args, **kwargs)


def _is_upload(kind: Kind, args: _Arguments, kwargs: _Keywords) -> bool:
    """Whether an operation copies from the host to a device. The driver drops the data of large copies."""
    if kind.name == "copy_":
        return bool(args[0].is_cuda)
    return kind.name == "_to_copy" and torch.device(kwargs.get("device") or "cpu").type == "cuda"


def _is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor of more than LIMIT_BYTES is on the device and too large to be computed."""
    return tensor.is_cuda and (tensor.is_floating_point() or tensor.nbytes > MASK_LIMIT_BYTES)


def _is_loss(result: torch.Tensor, args: _Arguments) -> bool:
    """Whether a backward may begin at a one-element result. Its own ``requires_grad`` is not set yet."""
    if not result.is_floating_point() or not result.is_cuda or not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in plain_tensors(args))


def _any_large(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.nbytes > LIMIT_BYTES and _is_large(value) for value in values)


def _device(args: _Arguments, kwargs: _Keywords) -> torch.device | None:
    """The CUDA device that an operation runs on; None for the host."""
    given = kwargs.get("device")
    if given is not None and torch.device(given).type != "cuda":
        return None
    for tensor in device_tensors(args):
        return tensor.device
    if given is None:
        return None
    device = torch.device(given)
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
