"""The value engine: runs every operation on the virtual GPU, and small ones on the host too.

On the virtual GPU an operation allocates what it allocates and computes nothing. Where all that it reads is small and
holds values, it is computed once more by PyTorch's CPU kernels over the same memory, and its result lands where the
script will read it. What the script reads and nobody computed is made up (:mod:`fakedist.gpu.values.inventions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fakedist.gpu.values.inventions import Inventions
from fakedist.gpu.values.kinds import Kind
from fakedist.gpu.values.memory import LIMIT_BYTES, Defined, host_view, is_small
from fakedist.gpu.values.truths import Truths

#: glibc takes larger blocks from the kernel, which gives zeros (M_MMAP_THRESHOLD's largest value).
_FRESH_BYTES = 32 << 20
_CPU = torch.device("cpu")
_PLAIN = torch.Tensor.__torch_dispatch__
#: These only look at their operands.
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}
_COPIES = {"_to_copy", "copy_", "clone"}


class ValueEngine:
    """Gives the script's small tensors their values.

    Args:
        seed: Of random numbers and of values that are made up.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kinds: dict[Any, Kind] = {}
        self._defined = Defined()
        self._truths = Truths()
        self._inventions = Inventions(seed)
        self._generators: dict[int, torch.Generator] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; what it returns is what the device operation returned."""
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = Kind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        tensors = list(_tensors(args)) if not kwargs else [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        if not on_device:
            return self._from_nowhere(kind, func, args, kwargs)
        if kind.name == "_amp_foreach_non_finite_check_and_unscale_":
            return func(*args, **kwargs)  # gradients are taken for finite: found_inf stays what it was
        if kind.name in ("lift_fresh", "lift"):
            return self._lifted(func(*args, **kwargs))
        if kind.dynamic or kind.name in _READS:
            return self._read(kind, func, args, kwargs)
        if kind.name in _COPIES and (kind.name != "clone"):
            crossed = self._copied(kind, func, args, kwargs)
            if crossed is not None:
                return crossed
        for tensor in on_device:
            if tensor.numel() > LIMIT_BYTES or not is_small(tensor):
                return self._not_computed(kind, func, args, kwargs)
        inputs = self._inputs(kind, args, kwargs)
        if all(self._defined.holds(tensor) for tensor in inputs if tensor.is_cuda):
            return self._computed(kind, func, args, kwargs)
        return self._not_computed(kind, func, args, kwargs)

    def is_undefined(self, tensor: torch.Tensor) -> bool:
        """Whether a device tensor holds nothing: it is large, or nobody computed it."""
        return tensor.is_cuda and (not is_small(tensor) or not self._defined.holds(tensor))

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A small device tensor's values, made up where there are none; None for a large one."""
        if not is_small(tensor):
            return None
        tensor = tensor.detach()
        self._settle(tensor, "print")
        return host_view(tensor)

    def invented(self) -> list[tuple[str, str, int, int, int]]:
        """Values made up since the last call: (operation, filename, line, calls, values)."""
        return self._inventions.take()

    # ---- how an operation is run

    def _from_nowhere(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation without device inputs: a factory, a copy to the device, or one of the host's own."""
        result = func(*args, **kwargs)
        if not (isinstance(result, torch.Tensor) and result.is_cuda):
            return result
        self._truths.made(kind, args, result)
        if not is_small(result):
            return result
        self._defined.forget(result)
        if kind.name == "_to_copy":
            host_view(result).copy_(args[0])
            self._defined.define(result)
        elif not kind.empty:
            self._fill_in(kind, func, args, kwargs, result)
        return result

    def _computed(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On the device, and on the host over the same memory."""
        result = func(*args, **kwargs)
        if kind.empty:
            self._forget(kind, args, kwargs, result)
        else:
            self._fill_in(kind, func, args, kwargs, result)
        return result

    def _not_computed(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On the device alone: what it writes holds nothing."""
        sign = kind.non_negative or (kind.keeps_sign and self._all_non_negative(args))
        result = func(*args, **kwargs)
        truth = self._truths.result(kind, args, result)
        for tensor in (*self._written(kind, args, kwargs), *(() if kind.written else _tensors((result,)))):
            if tensor.is_cuda and tensor.numel() <= LIMIT_BYTES and is_small(tensor):
                if truth is not None and tensor.dtype == torch.bool:
                    host_view(tensor).fill_(truth)
                    self._defined.define(tensor)
                else:
                    if not kind.written:
                        self._defined.forget(tensor)
                    self._defined.undefine(tensor, non_negative=sign)
        return result

    def _fill_in(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute on the host what the device operation should have written."""
        outputs = [tensor for tensor in _tensors((result,)) if tensor.is_cuda]
        written = self._written(kind, args, kwargs)
        ran = True
        try:
            with torch.random.fork_rng(devices=[], enabled=kind.random and not kind.takes_generator):
                computed = func(*self._on_host(args), **self._host_keywords(kind, func, kwargs))
        except Exception:  # no CPU kernel for it, or not for these types: the result then holds nothing
            computed, ran = None, False
        if kind.written:  # and _foreach_*_ return nothing
            mark = self._defined.define if ran else self._defined.undefine
            for tensor in written:
                if is_small(tensor):
                    mark(tensor)
            return
        for output, host in zip(outputs, _tensors((computed,)) if computed is not None else iter(()), strict=False):
            if not is_small(output):
                continue
            self._defined.forget(output)
            if host.shape == output.shape:
                host_view(output).copy_(host)
                self._defined.define(output)
        if computed is None:
            self._forget(kind, args, kwargs, result)

    def _read(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The script, or the size of a result, depends on values: they are there, or made up now."""
        if kind.name == "index" and not any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:])):
            computable = all(is_small(t) and self._defined.holds(t) for t in _tensors(args) if t.is_cuda)
            return (self._computed if computable else self._not_computed)(kind, func, args, kwargs)
        for tensor in _tensors((args, tuple(kwargs.values()))):
            if tensor.is_cuda:
                self._settle(tensor, kind.full_name)
        if kind.name == "_local_scalar_dense":
            return func(host_view(args[0]))
        device = next(tensor.device for tensor in _tensors(args) if tensor.is_cuda)
        computed = func(*self._on_host(args, settle=True), **self._host_keywords(kind, func, kwargs))
        if not isinstance(computed, (torch.Tensor, tuple, list)):
            return computed
        if isinstance(computed, torch.Tensor):
            return self._to_device(computed, device)
        return type(computed)(self._to_device(tensor, device) for tensor in computed)

    def _copied(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A copy between host and device; None for one within the device."""
        source = args[1] if kind.name == "copy_" else args[0]
        if kind.name == "copy_" and args[0].is_cuda and not source.is_cuda:
            result = func(*args, **kwargs)
            if is_small(result):
                host_view(result).copy_(source)
                self._defined.define(result)
            return result
        target = args[0].device if kind.name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if not source.is_cuda or target.type != "cpu":
            return None
        if is_small(source):
            self._settle(source, kind.full_name)
            return (
                func(args[0], host_view(source), *args[2:])
                if kind.name == "copy_"
                else func(host_view(source), **kwargs)
            )
        result = func(*args, **kwargs)
        self._inventions.count(kind.full_name, source.numel())
        if result.nbytes <= _FRESH_BYTES or kind.name == "copy_":
            result.zero_()
        return result

    def _lifted(self, result: torch.Tensor) -> torch.Tensor:
        """``torch.tensor(list, device="cuda")`` copies below the dispatcher; only this is seen of it."""
        if is_small(result):
            self._defined.define(result)
        return result

    # ---- values

    def _settle(self, tensor: torch.Tensor, operation: str) -> None:
        """Make up what a tensor that is read does not hold; large ones are read as zeros."""
        if not is_small(tensor) and tensor.numel() > 1:
            truth = self._truths.of(tensor)
            if truth is None:
                self._inventions.count(operation, tensor.numel())
            return
        if is_small(tensor) and self._defined.holds(tensor):
            return
        host = host_view(tensor)
        missing = self._defined.missing(tensor) if is_small(tensor) else torch.ones(tensor.shape, dtype=torch.bool)
        self._inventions.fill(host, missing, operation, non_negative=self._defined.is_non_negative(tensor))
        if is_small(tensor):
            self._defined.define(tensor)

    def _to_device(self, computed: torch.Tensor, device: torch.device) -> torch.Tensor:
        result = torch.empty_like(computed, device=device)
        if is_small(result):
            self._defined.forget(result)
            host_view(result).copy_(computed)
            self._defined.define(result)
        return result

    def _on_host(self, values: Any, *, settle: bool = False) -> Any:
        """Arguments with host views in the place of device tensors; large ones, where they are read, as zeros."""
        found: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                if settle and not is_small(value) and value.numel() > 1:
                    truth = self._truths.of(value)
                    found.append(torch.full((), bool(truth), dtype=torch.bool).to(value.dtype).expand(value.shape))
                else:
                    found.append(host_view(value))
            elif isinstance(value, (list, tuple)):
                found.append(self._on_host(value, settle=settle))
            elif isinstance(value, torch.device):
                found.append(_CPU)
            else:
                found.append(value)
        return type(values)(found) if isinstance(values, (list, tuple)) else found

    def _host_keywords(self, kind: Kind, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        found = dict(zip(kwargs, self._on_host(list(kwargs.values())), strict=True))
        if found.get("device") is not None:
            found["device"] = _CPU
        found.pop("pin_memory", None)
        if kind.takes_generator:
            found["generator"] = self._host_generator(kwargs.get("generator"))
        return found

    def _host_generator(self, given: torch.Generator | None) -> torch.Generator:
        """A host generator for a device's; it starts from the same seed."""
        if given is None:
            return self._generator
        if given.device.type == "cpu":
            return given
        found = self._generators.get(id(given))
        if found is None or found.initial_seed() != given.initial_seed():
            found = self._generators[id(given)] = torch.Generator().manual_seed(given.initial_seed())
        return found

    # ---- which tensors

    def _inputs(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Tensors whose values the result depends on."""
        if not (kind.overwrites and kind.written):
            return [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        read = [value for index, value in enumerate(args) if index not in kind.written]
        named = [value for name, value in kwargs.items() if name not in kind.written_names]
        return [*_tensors(tuple(read)), *_tensors(tuple(named))]

    def _written(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        if not kind.written:
            return []
        values = [args[index] for index in kind.written if index < len(args)]
        values += [value for name, value in kwargs.items() if name in kind.written_names]
        return [tensor for tensor in _tensors(tuple(values)) if tensor.is_cuda]

    def _forget(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for tensor in (*self._written(kind, args, kwargs), *_tensors((result,))):
            if tensor.is_cuda and is_small(tensor):
                self._defined.forget(tensor)

    def _all_non_negative(self, args: tuple[Any, ...]) -> bool:
        return all(self._defined.is_non_negative(tensor) for tensor in _tensors(args) if tensor.is_cuda)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors with memory of their own: not those that wrap others, such as AsyncCollectiveTensor."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if type(value).__torch_dispatch__ is _PLAIN:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
