"""The value engine: runs every operation on the virtual GPU, and small ones on the host too.

There an operation allocates memory and computes nothing. If its inputs are small and hold values, PyTorch's CPU kernels
run it again over the same memory. Values that the script reads but no kernel computed are made up
(:mod:`fakedist.gpu.values.inventions`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf

import torch
from torch import empty
from torch import tensor as new_tensor
from torch._ops import OpOverload

from fakedist.errors import InventedValueError
from fakedist.gpu.bare_steps import ReadTape
from fakedist.gpu.values.below_dispatch import folded, printed, replayed, triton_writes
from fakedist.gpu.values.composites import Composites, Foreach, Inside
from fakedist.gpu.values.contents import LIMIT_BYTES, Taint, host_view, is_large, is_small
from fakedist.gpu.values.following import Following, Large
from fakedist.gpu.values.graph_values import GraphValues
from fakedist.gpu.values.host import INDEXING, READS, Host, HostReads
from fakedist.gpu.values.inventions import Randoms, SeedAndOffset, script_line, values_in
from fakedist.gpu.values.no_data import NoData
from fakedist.gpu.values.operators import LISTED, Method, Operator, Run
from fakedist.gpu.values.routing import (
    CHOOSING,
    Routing,
    RunningLayer,
    experts_of_mask,
    routed_fraction,
    spread_over_experts,
)
from fakedist.gpu.values.sparse import Sparse, is_sparse
from fakedist.gpu.values.tensors import (
    Arguments,
    Keywords,
    answered_reads,
    as_device,
    as_generator,
    cuda_device,
    device_tensors,
    find_cover,
    host_waits,
    plain_tensors,
    protected,
    reported_reads,
    storage_of,
    tensor_at,
)
from fakedist.router_load import RouterLoad
from fakedist.rundir.notes import Note
from fakedist.rundir.rows import InventedRow, RouterPassRow
from fakedist.rundir.summary import RouterLoadFacts

#: The name in the report of reads that are not operations.
_PAST = "cudaMemcpy"
#: glibc takes larger blocks from the kernel, which zeroes them (M_MMAP_THRESHOLD's largest value).
_FRESH_BYTES = 32 << 20
#: Options that change what an operation computes from its arguments.
_CHANGING = {"alpha", "rounding_mode", "value", "reduce"}
#: For these a mean is the answer itself. For others it is only remembered.
_COUNTED = {"sum", "count_nonzero", "mean"}


class ValueEngine:
    """Gives the script's small tensors their values; ``strict`` raises InventedValueError instead of making one up."""

    def __init__(self, seed: int, *, strict: bool = False) -> None:
        self._runs: dict[OpOverload, Run] = {}
        self._cover = find_cover()
        self._tape: ReadTape | None = None
        self._is_over = False
        self._not_computed_before = 0
        self.host = Host(seed, strict=strict)
        self._randoms = Randoms(seed)
        self._reads = HostReads(self.host)
        self._foreach = Foreach(self.host)
        self._routing = Routing(self.host)
        self._following = Following(self.host, self._routing)
        self._no_data = NoData(self.host)
        self._large = Large(self.host)
        self.graphs = GraphValues(self.host)
        self._inside = Inside(self.execute)
        self._sparse = Sparse(self.host, self._inside.run)
        self.composites = Composites(self.host, self._inside.run, self._kernel)

    def execute(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> object:
        """Run one operation and return what the device operation returned."""
        run = self._runs.get(func)
        if run is None:
            run = self._runs[func] = self._run_for(Operator(func))
        self._cover(1)
        try:
            result = run(args, kwargs)
        finally:
            self._cover(-1)
        if self._routing.is_on:
            self._routing.ran(func, args, kwargs, result)
        return result

    def keep_reads(self, tape: ReadTape | None) -> None:
        """Keep what the host reads on a tape from now on, for a step that begins; no longer if it is None."""
        self._tape = tape
        if tape is not None:
            self._not_computed_before = self._no_data.operations

    def end(self) -> None:
        """Answer no question about device memory any more: it changes from now on without the engine."""
        self._is_over = True

    @contextmanager
    def below_dispatch(self) -> Iterator[None]:
        """Print tensors with their values, restore those of CUDA graphs in replays, compute folded constants.

        Other copies past the engine have zeros for values not computed, and are counted. RecordingError if torch
        differs.
        """
        with (
            printed(self.on_host),
            replayed(self.host.defined),
            reported_reads(self.read_past),
            folded(self.execute),
            triton_writes(),
        ):
            yield

    def read_past(self, num_bytes: int) -> bool:
        """Count uncomputed bytes copied past the engine, as values of four bytes; returns whether the copy fails."""
        try:
            self.host.inventions.count(_PAST, -(-num_bytes // 4))
        except InventedValueError as error:  # it must not pass through the driver
            sys.stderr.write(f"fakedist: {error.message}\n")
            return True
        return False

    def is_undefined(self, tensor: torch.Tensor) -> bool:
        """Return whether a device tensor is known to lack values: it is large, or no kernel computed it."""
        return tensor.is_cuda and not self._is_over and not self.host.holds(tensor)

    def not_sent(self, tensor: torch.Tensor, when_read: Callable[[], object]) -> bool:
        """Mark a tensor's values, which another rank should have sent, as made up. Returns whether reads are seen.

        ``when_read`` is called at the first read of one, or of a value computed from it. Reads of large tensors are not
        seen.
        """
        if not is_small(tensor):
            self.host.spoil(tensor)
            return False
        self.host.taints.mark(tensor, Taint(when_read=when_read))
        return True

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A small device tensor's values, with missing ones made up; None for a large or a sparse tensor."""
        if tensor.layout is not torch.strided:
            return None
        return self.host.settle(tensor.detach(), "print") if is_small(tensor) else None

    def routes(self, indices: torch.Tensor, num_experts: int) -> torch.Tensor:
        """The experts of each token, [tokens, top-k], that a dispatcher reads; where none are held, spread evenly.

        ``indices`` may be a mask, [tokens, experts].
        """
        self._routing.read(indices)
        if indices.dtype is not torch.bool:
            values = self.on_host(indices)
            return spread_over_experts(indices.shape, num_experts) if values is None else values
        mask = host_view(indices.detach()) if self.host.holds(indices) else self._large.value(indices)
        if mask is not None:
            return experts_of_mask(mask)
        mean = self.host.means.of(indices)
        if mean is None:
            self.host.inventions.count("how many experts a token has", len(indices))
        return spread_over_experts(torch.Size([len(indices), round((mean or 0) * num_experts) or 1]), num_experts)

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A plain tensor's values; None if kernels did not compute all of them."""
        if not tensor.is_cuda:
            return None if self.host.has_no_data(tensor) else tensor
        if not self.host.holds(tensor):
            recipe = self.host.recipe(tensor)
            return None if recipe is None or recipe.taint is not None else self._large.value(tensor)
        return host_view(tensor.detach()) if self.host.taints.of(tensor) is None else None

    def settled(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`known`, and the made-up values that the script has read: it knows them."""
        taint = self.host.taints.of(tensor) if tensor.is_cuda and self.host.holds(tensor) else None
        return host_view(tensor.detach()) if taint is not None and taint.first_reader else self.known(tensor)

    def route_by(self, load: RouterLoad, rank: int, whereabouts: Callable[[], RunningLayer]) -> None:
        """Let routers that pick by values that no kernel computed send a rank's tokens by a load."""
        self._routing.load, self._routing.rank, self._routing.whereabouts = load, rank, whereabouts

    def of_ranks(self, mine: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor] | None:
        """Each rank's values for this tensor's if these follow from a router's choices, on the host; else None."""
        if self._is_over or self._routing.load.is_even or not mine.numel():
            return None
        values = (
            host_view(mine.detach()) if self.host.holds(mine) else self._large.value(mine) if mine.is_cuda else mine
        )
        return None if values is None else self._routing.of_ranks(values, ranks)

    def experts_of_ranks(self, experts: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor] | None:
        """The experts of each rank's tokens, if this rank's are these ([tokens, top-k] on the host)."""
        return None if self._is_over else self._routing.experts_of_ranks(experts, ranks)

    def router_facts(self) -> RouterLoadFacts | None:
        """The routers that picked experts by made-up values, and what their load sent to whom; None without any."""
        return self._routing.facts()

    def router_passes(self) -> list[RouterPassRow]:
        """Every call of these routers."""
        return self._routing.calls()

    def invented(self) -> list[InventedRow]:
        """Values made up since the last call."""
        return self.host.inventions.take()[0]

    def decisions(self) -> list[Note]:
        """The report's notes on decisions of the script that depend on made-up values."""
        return list(self.host.inventions.decisions())

    def not_computed_on_host(self) -> tuple[int, str]:
        """Number of operations on large host floats not computed, and ``file:line`` of the first ("": a backward)."""
        filename, line = self._no_data.first_line
        return self._no_data.operations, f"{filename}:{line}" if filename else ""

    def leaves_host_out(self) -> bool:
        """Whether the last step for which reads were kept had operations on large host floats, not computed."""
        return self._no_data.operations > self._not_computed_before

    def _run_for(self, operator: Operator) -> Run:
        if (method := self.composites.method(operator)) is not None:
            return partial(method, operator)
        if operator.name != "empty" and (operator.is_view or operator.reshapes or operator.empty or operator.is_idle):
            return _plain(operator.func)
        return partial(self._method(operator), operator)

    def _foreign(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """An operation made of others. The driver knows what the kernels write that it launches itself."""
        written = {storage_of(tensor)[0] for tensor in self._written(operator, args, kwargs)}
        given = device_tensors((args, tuple(kwargs.values())))
        self._cover(-1)
        try:
            with protected(tensor for tensor in given if storage_of(tensor)[0] not in written):
                return self._inside.run(operator, args, kwargs)
        finally:
            self._cover(1)

    def _method(self, operator: Operator) -> Method:
        name = operator.name
        if name == "empty":
            return self._empty
        if not operator.is_kernel:
            return self._foreign
        if name in ("lift_fresh", "lift"):
            return self._lifted
        if name.startswith(LISTED):
            return self._listed
        if name in ("copy_", "_to_copy"):
            return self._copied
        if name in INDEXING:
            return self._indexed
        return self._read if operator.dynamic or name in READS else self._kernel

    def _empty(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        result = operator.func(*args, **kwargs)
        if kwargs.get("dtype") is torch.bool and result.is_cuda and (mean := routed_fraction(result)) is not None:
            # Each replay of a CUDA graph writes it again.
            is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            self.host.means.know(result, mean, writes_to_come=inf if is_captured else 1.0)
            self._routing.fused.add(script_line())
        return result

    def _kernel(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """An operation that only writes device memory. Nearly all operations take this path."""
        if self._no_data.concerns(operator, args, kwargs):
            if not _is_upload(operator, args, kwargs):
                return self._no_data.run(operator, args, kwargs)
            args = self._no_data.upload(operator, args, kwargs)
            return self._not_computed(operator, args, kwargs)
        if not operator.like:
            for value in args:
                if isinstance(value, torch.Tensor):
                    if is_sparse(value):
                        return self._sparse.run(operator, args, kwargs)
                    if value.layout is not torch.strided or value.is_nested:
                        return operator.func(*args, **kwargs)
                    if value._is_zerotensor():
                        return self._inside.run(operator, args, kwargs)
                    if value.nbytes > LIMIT_BYTES and is_large(value):
                        return self._not_computed(operator, args, kwargs)
                elif isinstance(value, (list, tuple)):
                    if any(map(is_sparse, value)):
                        return self._sparse.run(operator, args, kwargs)
                    if _any_large(value):
                        return self._not_computed(operator, args, kwargs)
        complete = self._following.complete(operator, self._inputs(operator, args, kwargs))
        if complete is None:
            return self._not_computed(operator, args, kwargs)
        if self._following.routes(operator, args):
            return self._following.route(operator, args, kwargs)
        return self._computed(operator, args, kwargs, self.host.taint(complete))

    def _computed(self, operator: Operator, args: Arguments, kwargs: Keywords, taint: Taint | None) -> object:
        drawn_at = self._drawn_at(args, kwargs) if operator.random else None
        written = self._written(operator, args, kwargs) if operator.written else []
        before = [(host_view(tensor), host_view(tensor).clone()) for tensor in written if operator.restores]
        result = self._on_device(operator, args, kwargs)
        for memory, kept in before:
            memory.copy_(kept)
        outputs = device_tensors((result,))
        if not outputs and not written:
            return result  # an operation of the host alone
        if operator.is_view and storage_of(outputs[0]) == storage_of(tensor_at(args, 0)):
            return result  # reshape() had nothing to copy: the values are the argument's
        if not all(is_small(tensor) for tensor in outputs):
            if not self._follow_large(operator, args, kwargs, result, written):
                self._holds_nothing(operator, args, kwargs, result, written)
            return result
        if operator.zeros:
            self.host.zero(written or outputs)
            return result
        values = self._on_host(operator, _shape_alone(args) if operator.like else args, kwargs, drawn_at)
        if values is None:
            self._holds_nothing(operator, args, kwargs, result, written)
            return result
        if written:
            for tensor in written:
                self.host.defined.define(tensor)
                if taint is None:
                    self.host.taints.clear(tensor)
                    self.host.means.forget(tensor)
        else:
            for output, host in zip(outputs, values, strict=False):
                if host.shape == output.shape and 0 not in output.stride():  # expanded: a view of an argument
                    self.host.write(output, host)
        if taint is not None:
            self._following.mark(operator, args, written or outputs, taint, computed=() if written else values)
        return result

    def _not_computed(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        result = self._on_device(operator, args, kwargs)
        if operator.is_view and (views := device_tensors((result,))) and _is_among(views[0], device_tensors(args)):
            return result
        written = self._written(operator, args, kwargs) if operator.written else []
        if self._follow_large(operator, args, kwargs, result, written):
            return result
        if operator.followed or operator.written or operator.name in CHOOSING:
            if operator.name in CHOOSING and not written:
                self._choose(operator, args, kwargs, result)
            self._holds_nothing(operator, args, kwargs, result, written)
        if operator.info_at >= 0 and isinstance(result, tuple):
            self.host.zero(device_tensors((result[operator.info_at],)))  # 0: it worked
        if isinstance(result, torch.Tensor) and result.numel() == 1 and _is_loss(result, args):
            self.host.means.know_non_negative(result)
        return result

    def _on_device(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        return self._inside.run(operator, args, kwargs) if operator.reads_midway else operator.func(*args, **kwargs)

    def _follow_large(
        self, operator: Operator, args: Arguments, kwargs: Keywords, result: object, written: list[torch.Tensor]
    ) -> bool:
        reading = self._large.reads(operator, args, kwargs)
        outputs = [] if reading is None else written or device_tensors((result,))
        if reading is not None and outputs and self._large.follow(operator, args, kwargs, outputs, reading):
            if not is_small(outputs[0]):
                self._holds_nothing(operator, args, kwargs, result, written)
            return True
        for tensor in written:
            self.host.forget_recipe(tensor)
        return False

    def _listed(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        run = self._no_data.run if self._no_data.concerns(operator, args, kwargs) else self._foreach.run
        if any(isinstance(value, (list, tuple)) and any(map(is_sparse, value)) for value in args):
            run = self._inside.run
        return run(operator, args, kwargs)

    def _lifted(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``torch.tensor(list, device="cuda")`` copies below the dispatcher. This is the only operation visible."""
        result = operator.func(*args, **kwargs)
        if result.is_cuda and is_small(result):
            self.host.defined.define(result)
        return result

    def _read(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        device = cuda_device(args, {})
        if device is None:
            if operator.name == "_local_scalar_dense" and self.host.has_no_data(args[0]):
                args = (self._no_data.take_element(args[0], operator.full_name),)
            return operator.func(*args, **kwargs)
        if operator.takes_generator:
            drawn_at = self._randoms.seed_and_offset(device, as_generator(kwargs.get("generator")))
            self._randoms.advance(device, as_generator(kwargs.get("generator")))
            kwargs = kwargs | {"generator": self._randoms.generator(drawn_at)}
        host_waits(device)
        result = self._reads.answer(operator, args, kwargs)
        if self._tape is not None:
            self._tape.read(operator.func, args, result)
        return result

    def _indexed(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        if tensor_at(args, 0).is_cuda:
            before, args = args, self._reads.indices(operator, args)
            if args is not before:
                host_waits(tensor_at(args, 0).device)
                if self._tape is not None:
                    self._tape.masks(before[1], args[1])
        return self._kernel(operator, args, kwargs)

    def _copied(self, operator: Operator, args: Arguments, kwargs: Keywords) -> object:
        """``copy_`` and ``_to_copy``: within the device, to another dtype, or between it and the host."""
        if operator.name == "copy_":
            source, goes_to_host = tensor_at(args, 1), not tensor_at(args, 0).is_cuda
        else:
            target = as_device(kwargs.get("device"))
            source, goes_to_host = tensor_at(args, 0), target is not None and target.type == "cpu"
        if not source.is_cuda or not goes_to_host or is_sparse(source):  # a sparse tensor's parts are copied one by one
            return self._kernel(operator, args, kwargs)
        if is_small(source):
            is_asynchronous = bool(operator.argument("non_blocking", args, kwargs))
            if not is_asynchronous:
                host_waits(source.device)
            settled = self.host.settle(source, operator.full_name)
            result = operator.func(*(settled if value is source else value for value in args), **kwargs)
            if self._tape is not None:
                self._tape.copied(settled, result, is_asynchronous=is_asynchronous)
            return result
        with answered_reads():
            result = self._no_data.download(operator, args, kwargs)
        self._dropped(operator, source, result)
        return result

    def _drawn_at(self, args: Arguments, kwargs: Keywords) -> SeedAndOffset | None:
        device = cuda_device(args, kwargs)
        return None if device is None else self._randoms.seed_and_offset(device, as_generator(kwargs.get("generator")))

    def _on_host(
        self, operator: Operator, args: Arguments, kwargs: Keywords, drawn_at: SeedAndOffset | None
    ) -> list[torch.Tensor] | None:
        host_args, host_kwargs = self.host.arguments(args), self.host.keywords(kwargs)
        if drawn_at is not None and operator.takes_generator:
            host_kwargs["generator"] = self._randoms.generator(drawn_at)
            drawn_at = None
        try:
            if operator.name == "histc":  # the CPU's has no kernel for integers
                values = tensor_at(args, 0)
                counts = operator.func(host_view(values).double(), *host_args[1:], **host_kwargs)
                return [counts.to(values.dtype)]
            if drawn_at is None:
                return plain_tensors((operator.func(*host_args, **host_kwargs),))
            with self._randoms.as_default(drawn_at):
                return plain_tensors((operator.func(*host_args, **host_kwargs),))
        except Exception:  # no CPU kernel, or none for these types: the result holds nothing
            return None

    def _holds_nothing(
        self, operator: Operator, args: Arguments, kwargs: Keywords, result: object, written: list[torch.Tensor]
    ) -> None:
        means = self.host.means
        if isinstance(result, tuple) and result:
            result = result[0]  # a loss comes with its total weight, an extreme with its index
        followed = result if operator.followed and isinstance(result, torch.Tensor) and result.is_cuda else None
        if followed is not None and written and followed.nbytes < storage_of(followed)[1]:
            followed = None  # only part of it was written
        mean = (
            None
            if followed is None
            else means.follow(operator.name, args, followed, is_plain=_CHANGING.isdisjoint(kwargs))
        )
        for tensor in written:
            self.host.defined.spoil(tensor)
            if followed is None:
                means.forget(tensor)
        if followed is not None and mean is not None and is_small(followed) and not followed.is_complex():
            self._write_mean(operator, args, followed, mean)

    def _write_mean(self, operator: Operator, args: Arguments, result: torch.Tensor, mean: float) -> None:
        constant = mean in (0.0, 1.0) and operator.name not in _COUNTED
        if constant or (operator.name in _COUNTED and result.dtype != torch.bool):
            whole = not result.is_floating_point()
            means, mask = self.host.means, tensor_at(args, 0)
            is_assumed = means.is_assumed(result) or (not constant and means.is_assumed(mask))
            if not constant and not is_assumed and means.of(mask) not in (0.0, 1.0):
                self.host.inventions.count(operator.full_name, result.numel())
            self.host.write(result, new_tensor(round(mean) if whole else mean))
            if is_assumed:
                self.host.taints.mark(result, Taint())

    def _choose(self, operator: Operator, args: Arguments, kwargs: Keywords, result: object) -> None:
        indices = next(reversed(device_tensors((result,))), None)
        if indices is None or indices.dtype != torch.int64 or not is_small(indices):
            return
        if indices is result and operator.name not in ("argmax", "argmin", "argsort"):
            return  # max() of integers
        self.host.inventions.count(operator.full_name, indices.numel())
        self.host.write(indices, self._routing.choose(operator, args, kwargs, indices))
        self._routing.picked(operator, args, kwargs, indices)

    def _dropped(self, operator: Operator, source: torch.Tensor, result: torch.Tensor) -> None:
        """A large tensor came to the host. It gets the known values, else made-up floats, or zeros for integers."""
        if self.host.has_no_data(result):
            self._no_data.count()
            return
        mean = self.host.means.of(source)
        if mean == 1.0:
            result.fill_(1)
        elif mean != 0.0 and (result.is_floating_point() or result.is_complex()):
            non_negative = self.host.means.is_non_negative(source)
            self.host.inventions.draw(result, source, operator.full_name, non_negative=non_negative)
            return
        elif storage_of(result)[1] <= _FRESH_BYTES:
            result.zero_()
        if mean not in (0.0, 1.0):
            self.host.inventions.count(operator.full_name, values_in(source.numel(), source))

    def _inputs(self, operator: Operator, args: Arguments, kwargs: Keywords) -> list[torch.Tensor]:
        if operator.like:
            return plain_tensors(args[1:])
        if not (operator.overwrites and operator.written):
            return plain_tensors((args, tuple(kwargs.values())))
        read = [value for index, value in enumerate(args) if index not in operator.written]
        return plain_tensors((read, [value for name, value in kwargs.items() if name not in operator.written_names]))

    def _written(self, operator: Operator, args: Arguments, kwargs: Keywords) -> list[torch.Tensor]:
        values = [args[index] for index in operator.written if index < len(args)]
        values += [value for name, value in kwargs.items() if name in operator.written_names]
        return device_tensors(values)


def _plain(func: OpOverload) -> Run:
    def run(args: Arguments, kwargs: Keywords) -> object:  # views are frequent, and a partial would cost them 3 %
        return func(*args, **kwargs)

    return run


def _shape_alone(args: Arguments) -> Arguments:
    first = tensor_at(args, 0)
    return (empty((), dtype=first.dtype).expand(first.shape), *args[1:])


def _is_among(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(storage_of(tensor)[0] == storage_of(other)[0] for other in others)


def _is_upload(operator: Operator, args: Arguments, kwargs: Keywords) -> bool:
    if operator.name == "copy_":
        return tensor_at(args, 0).is_cuda
    target = as_device(kwargs.get("device"))
    return operator.name == "_to_copy" and target is not None and target.type == "cuda"


def _is_loss(result: torch.Tensor, args: Arguments) -> bool:
    """Return whether a backward may begin at a one-element result, whose own ``requires_grad`` is not set yet."""
    if not result.is_floating_point() or not result.is_cuda or not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in plain_tensors(args))


def _any_large(values: Iterable[object]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.nbytes > LIMIT_BYTES and is_large(value) for value in values)
