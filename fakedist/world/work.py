"""Calls in progress and calls that are over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensors = Sequence[torch.Tensor]

#: Not in torch's stubs.
_Work: Any = dist.distributed_c10d.Work


class Done(_Work):  # type: ignore[misc]
    """A call that is over. It holds its tensors until it is waited on, as ProcessGroupNCCL does."""

    def __init__(self, outputs: Tensors, held: Any = None, event: torch.cuda.Event | None = None) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._held = held
        self._event = event

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The current stream waits for the call; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._outputs[0].device).wait_event(self._event)
            self._event = None
        self._held = None
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always."""
        return True

    def exception(self) -> None:
        """Never."""

    def source_rank(self) -> int:
        """Rank that a receive from anywhere came from: the first that is not this one, by convention 0."""
        return 0

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completed, with the output tensors."""
        self.wait()
        devices: list[int | str | torch.device] = list({tensor.device for tensor in self._outputs if tensor.is_cuda})
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self._outputs)
        return future

    getFuture = get_future  # noqa: N815 (C++ callers ask for it by this name)


class Call:
    """A call in progress: a context that gives a function which makes the finished work."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._inside: Any = None

    def __enter__(self) -> Call:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._inside.__exit__(*error)

    def __call__(self, outputs: Tensors, held: Any = None) -> Done:
        """The finished call, which holds ``held`` until it is waited on."""
        if self._stream is None:
            return Done(outputs, held)
        return Done(outputs, (outputs, held), self._stream.record_event())


#: A call on CPU tensors, which is over when it returns.
HERE = Call(None)
