"""Calls in progress and finished calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Work

from fakedist.world.checks import Tensors

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
#: c10d's operations write below autograd: they add no history, and saved tensors keep their version.
_BelowAutograd: type[AbstractContextManager[None]] = torch._C._AutoDispatchBelowADInplaceOrView


class Done(Work):
    """A finished call. Behaves like WorkNCCL in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.

    Constructed without arguments and filled in by :func:`done`: an ``__init__`` would be a tenth of a tiny call.

    Attributes:
        outputs: The output tensors, held for as long as this object lives.
        kept: Anything else that the call holds for as long as this object lives.
        source: Group rank that a receive came from.
    """

    outputs: Tensors = ()
    _stash: object = None
    _stream: torch.cuda.Stream | None = None
    _event: torch.cuda.Event | None = None
    kept: object = None
    source = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the call; the host does not wait."""
        if self._event is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
            self._event = None
        self._stash = None
        return True

    def synchronize(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true."""
        return True

    def exception(self) -> None:
        """Always None: a call never fails."""

    def source_rank(self) -> int:
        """Group rank that a receive came from; from any rank and without a tape, the first other rank."""
        return self.source

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return list(self.outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A completed future of the output tensors. Waiting for it waits for the call's stream."""
        if self._stream is None:
            future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
            future.set_result(self.result())
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):
            future.set_result(self.result())
        return future

    getFuture = get_future  # noqa: N815 (C++ callers look it up by this name)


def done(outputs: Tensors, stash: object = None, stream: torch.cuda.Stream | None = None) -> Done:
    """Make a finished call.

    Args:
        outputs: Its results.
        stash: Held until a stream waits for the call.
        stream: The stream that the call ran on; None if it ran on the current one.
    """
    work = Done()
    work.outputs = outputs
    if stash is not None:
        work._stash = stash
    if stream is not None:
        work._stream, work._event = stream, stream.record_event()
    return work


class Coalesced:
    """Calls that are waited for as one.

    Attributes:
        done: The calls made so far.
    """

    def __init__(self) -> None:
        self.done: list[Done] = []

    def end(self) -> Done:
        """Return one finished call that stands for all of them."""
        streams = {work._stream.cuda_stream: work._stream for work in self.done if work._stream is not None}
        whole = done([], [work._stash for work in self.done], next(iter(streams.values()), None))
        whole.kept = [work.kept for work in self.done]
        return whole


class Given(NamedTuple):
    """The description of a call.

    Attributes:
        operation: Its name.
        tensors: The tensors that it reads and writes.
        is_async: Whether it returns before it has finished.
        coalesced: The coalesced calls that it belongs to; None if it stands alone.
        timed: A context that times the call on its stream; None unless a step is being timed.
    """

    operation: str
    tensors: object
    is_async: bool
    coalesced: Coalesced | None
    timed: AbstractContextManager[None] | None = None


class Call:
    """A call in progress: a context in which arriving values are written, below autograd.

    An asynchronous call runs on the group's own stream and holds its tensors until a stream waits for it. A synchronous
    one runs on the current stream and holds nothing. ``ProcessGroupNCCL::collective`` does the same since torch 2.8.

    Args:
        given: The description of the call.
        stream: The stream to run on, after the work queued on the current one; None for the current stream.
    """

    __slots__ = ("_given", "_inside", "_stream")
    _inside: AbstractContextManager[object]

    def __init__(self, given: Given, stream: torch.cuda.Stream | None) -> None:
        self._given = given
        self._stream = stream

    def __enter__(self) -> Call:
        stream = self._stream
        with ExitStack() as inside:
            if profiler_enabled():
                inside.enter_context(torch.profiler.record_function(f"fakedist::{self._given.operation}"))
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
                inside.enter_context(torch.cuda.stream(stream))
            if self._given.timed is not None:
                inside.enter_context(self._given.timed)
            inside.enter_context(_BelowAutograd())
            self._inside = inside.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(None, None, None)

    def hold(self, more: object) -> None:
        """Hold something in addition to the tensors."""
        self._given = self._given._replace(tensors=[self._given.tensors, more])

    def done(self, outputs: Tensors) -> Done:
        """Return the finished call."""
        given = self._given
        work = done(outputs, given.tensors if given.is_async else None, self._stream)
        if given.coalesced is not None:
            given.coalesced.done.append(work)
        return work


class Plain(Call):
    """A synchronous, unprofiled call. A tiny one must not cost more than it does on torch's own fake backend."""

    __slots__ = ()

    def __init__(self) -> None:
        self._inside = _BelowAutograd()

    def __enter__(self) -> Call:
        self._inside.__enter__()
        return self

    def hold(self, more: object) -> None:
        """A synchronous call holds nothing."""

    def done(self, outputs: Tensors) -> Done:
        """Return one shared work: ProcessGroupNCCL returns none at all for synchronous calls."""
        return _OVER


_OVER = Done()
