"""A timed step among the recorded ones, the last one wanted: tells a tracer what runs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from fakedist.record.cuda_graphs import captures
from fakedist.record.ledger import Ledger
from fakedist.record.operations import Operations
from fakedist.record.position import Position
from fakedist.record.timed_step.script_ranges import script_ranges
from fakedist.record.timed_step.tracer import OperationTracer
from fakedist.run.encoding import Record
from fakedist.run.notes import Note
from fakedist.run.rows import Place
from fakedist.run.time_notes import not_timed, timed_to_its_optimizer


class RecordedStep:
    """Has recorded steps timed. Of several, the last one with the largest input counts.

    A step that ends with the run counts only if none did before, and as far as its last optimizer step: nothing tells
    what follows it in the step (averages of parameters) from what the script does at its end (a checkpoint).

    Args:
        tracer: Traces the steps. None times no step.
        wanted: Whether to time a step that begins.
        size: Returns the elements of a step's input.
        position: Where the rank is.
        operations: The operations that it runs.
        ledger: The calls that it makes on process groups.
    """

    def __init__(
        self,
        tracer: OperationTracer | None,
        wanted: Callable[[int], bool],
        size: Callable[[int], int],
        position: Position,
        *,
        operations: Operations,
        ledger: Ledger,
    ) -> None:
        self._tracer = tracer
        self._wanted, self._size = wanted, size
        self._largest, self._cut_short = -1, 0
        self._position = position
        self._operations = operations
        self._ledger = ledger
        self._step = 0  # the step that is timed now
        self._at = 0
        self._was_timed = False
        self._why_not = ""
        self._num_captures = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow captures of CUDA graphs, which the timed step may launch later, and the script's ranges."""
        if self._tracer is None:
            yield
            return
        with captures(self._capture_begins, self._capture_ended), script_ranges(self._tracer):
            yield

    def follow(self) -> None:
        """Take up the position's step, which may have changed."""
        step = self._position.step
        if self._tracer is None or step == self._at:
            return
        self._at = step
        if not self._step and self._wanted(step):
            self._step = step
            self._tell_operations()
            self._tracer.begin(step)

    def optimizer_ended(self) -> None:
        """An optimizer's step ended, perhaps the last one of the step."""
        if self._step and self._tracer is not None:
            self._tracer.may_end()

    def step_ended(self, step: int, *, is_cut_short: bool) -> Sequence[Record]:
        """End a step. Returns the journal's records of its kernels if it was timed, and counts.

        Args:
            step: The step.
            is_cut_short: Whether it ends with the run.
        """
        if self._tracer is None or step != self._step:
            return ()
        self._end()
        size = self._size(step)
        if self._was_timed and (is_cut_short or size < self._largest):
            return ()
        if is_cut_short:
            self._tracer.cut_short()
            self._cut_short = step
        if self._at != step:  # its end is known only now, so the times contain work of the next step too
            self._why_not = f"it was not known at once that step {step}, which was timed, had ended"
            return ()
        self._was_timed, self._largest = True, size
        return self._tracer.records()

    def step_went_on(self, step: int) -> None:
        """Undo the end of a step. The next one has not begun after all, and the times of this one are incomplete."""
        self._at = step
        if self._step == step + 1:
            self._end()
        elif self._step != step and self._was_timed:
            self._was_timed = False
            self._why_not = f"step {step}, which was timed, went on"

    def moved(self) -> None:
        """Tell the tracer that a module or a phase began or ended in this thread."""
        tracer = self._operations.tracer
        if tracer is not None:
            tracer.place(self._place())

    def close(self, last_step: int) -> list[Note]:
        """End the run. Returns a note if no step was timed, or not all of one."""
        if self._tracer is None:
            return []
        unfinished = self._step
        if unfinished:
            self._end()
        if self._was_timed:
            return [timed_to_its_optimizer(self._cut_short)] if self._cut_short else []
        if self._why_not:
            return [not_timed(self._why_not)]
        if unfinished:
            return [not_timed(f"step {unfinished}, which is timed, did not end")]
        if not last_step:
            return [not_timed("there was no training step")]
        wanted = f"--steps {last_step} times step {last_step}"
        return [not_timed(f"the run ended in step {last_step}, before the one that is timed ({wanted})")]

    def _end(self) -> None:
        assert self._tracer is not None
        self._step = 0
        self._tell_operations()
        self._tracer.end()

    def _place(self) -> Place:
        return self._position.places[self._position.scope()]

    def _tell_operations(self) -> None:
        """Report operations and collectives to the tracer only while a step is timed or a graph is captured."""
        tracer = self._tracer if self._step or self._num_captures else None
        self._operations.trace(tracer)
        self._ledger.around = None if tracer is None else self._around

    def _around(self, sequence: int, operation: str) -> AbstractContextManager[None]:
        assert self._tracer is not None
        return self._tracer.collective(sequence, self._position.op, operation, self._place())

    def _capture_begins(self) -> None:
        self._num_captures += 1
        self._tell_operations()
        if self._tracer is not None:
            self._tracer.capture_begins()

    def _capture_ended(self) -> None:
        self._num_captures -= 1
        self._tell_operations()
        if self._tracer is not None:
            self._tracer.capture_ended()
