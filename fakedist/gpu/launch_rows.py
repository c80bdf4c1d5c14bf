"""The timed step's launches as the journal's record, with the tags that connect them to operations."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fakedist.gpu.demand.launch_demand import LaunchDemands, Tagged
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.gpu.launch_log import Launch, LaunchKind
from fakedist.rundir.encoding import Columns
from fakedist.rundir.launch_records import ALLOCATOR_CALLS, ALLOCATOR_WAITS, HostWork, LaunchesRecord, RangeRow, WorkRow
from fakedist.rundir.rows import Location
from fakedist.rundir.schema import PHASES


class Tags:
    """Gives tags in order. ``is_compiled``: compiled code may run operations while traced, and tags them itself."""

    is_compiled = False

    def __init__(self) -> None:
        self.tag: Callable[[], int] = itertools.count().__next__

    def operation(self) -> int:
        """A tag for an operation that begins in Python in this thread."""
        return self.tag()

    def begin(self, set_tag: int, outside: Callable[[int], int]) -> None:
        """Begin a run: ``set_tag`` is the address of the driver's function that takes this thread's tag.

        ``outside`` returns the tag outside of operations for a scope.
        """

    def switch(self, *, traced: bool, captured: bool) -> None:
        """Say whether a step is traced, and whether a graph is captured, whose operations run in Python."""

    def forget_outsides(self) -> None:
        """Ask again for tags outside of operations."""

    def learn(self, tag: int, operation: str, demand: Demand | None) -> None:
        """Learn the demand of the operation with this tag, if each call of it with such arguments has the same."""

    def called(self, tag: int) -> None:
        """This thread is in a function of an extension; -1 if it left them."""

    def take_scope(self) -> int:
        """Scope of this thread's last operation; -1 if it ran in Python, or was taken before."""
        return -1

    def take(self, location_of: Callable[[int], Location]) -> Iterator[tuple[int, Tagged]]:
        """The operations that compiled code ran in the step, by their tags. ``location_of`` is for scopes."""
        return iter(())


@dataclass(frozen=True)
class ScriptRange:
    """A range: its name, its thread, how many of that thread are around it, and its position in the log."""

    name: str
    thread: int
    depth: int
    begin: int
    end: int = 0


class StepRanges:
    """Open ranges, and those of the step that ended. ``position`` returns how many launches the log has."""

    def __init__(self, position: Callable[[], int]) -> None:
        self._position = position
        self._is_on = False
        self._open: dict[int, ScriptRange] = {}
        self._closed: list[ScriptRange] = []
        self._next = 0
        self._threads: dict[int, int] = {}

    def begins(self, name: str) -> int:
        """A range begins in this thread. Return its number."""
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        depth = sum(span.thread == thread for span in self._open.values())
        number, self._next = self._next, self._next + 1
        self._open[number] = ScriptRange(name, thread, depth, self._position() if self._is_on else 0)
        return number

    def ended(self, number: int) -> None:
        """The range with that number ended."""
        span = self._open.pop(number, None)
        if span is not None and self._is_on:
            self._closed.append(replace(span, end=self._position()))

    def step_begins(self) -> None:
        """The step begins. What is open began before its first launch."""
        self._is_on, self._closed = True, []
        self._open = {number: replace(span, begin=0) for number, span in self._open.items()}

    def step_ended(self, num_launches: int) -> None:
        """The step ended, with that many launches. What is open lasts beyond it, or is of the next step."""
        self._is_on = False
        ours = [span for span in self._open.values() if span.begin < num_launches]
        self._closed += [replace(span, end=num_launches) for span in ours]

    def cut_short(self, num_launches: int) -> None:
        """The step that ended keeps only so many of its launches."""
        ours = [span for span in self._closed if span.begin < num_launches]
        self._closed = [replace(span, end=min(span.end, num_launches)) for span in ours]

    @property
    def of_step(self) -> Sequence[ScriptRange]:
        """Ranges of the step that ended."""
        return self._closed


def range_rows(ranges: Sequence[ScriptRange], row_of: Sequence[int]) -> list[RangeRow]:
    """A step's ranges as they began, outer first. ``row_of``: rows before each launch of the log, and of all."""
    return [
        RangeRow(span.name, span.thread, span.depth, row_of[span.begin], row_of[span.end])
        for span in sorted(ranges, key=lambda span: (span.begin, -span.end, span.depth))
    ]


_PHASES = {name: code for code, name in enumerate(PHASES)}
_HOST_WAITS = (LaunchKind.HOST_WAITS, LaunchKind.HOST_WAITS_FOR_DEVICE)
_Shape = tuple[int, ...]
#: Threads beyond these are one.
_MOST_THREADS = 255


class LaunchRows:
    """The launches of a step, from its log, the operations by tag, and the script's ranges."""

    def __init__(
        self,
        step: int,
        launches: Sequence[Launch],
        tags: Mapping[int, Tagged],
        name: Callable[[Launch], str],
        *,
        ranges: Sequence[ScriptRange] = (),
        host_work: Sequence[tuple[int, HostWork]] = (),
    ) -> None:
        self._step = step
        self._launches = launches
        self._tags = tags
        self._ranges = ranges
        self._host_work = host_work
        self._demands = LaunchDemands(launches, tags, name)
        self._nowhere = Tagged(-1, "", Location(step, "other", 0, False), counts=False)
        self._work: dict[WorkRow, int] = {}
        self._texts: dict[str, int] = {"": 0}
        self._shapes: dict[_Shape, int] = {}
        self._last_tag = -1
        #: Of each row, its launch's position, and whether it is a wait for work that its operation launched.
        self.positions: list[tuple[int, bool]] = []

    def record(self) -> LaunchesRecord:
        """The journal's record of them. Launches that are part of a collective's stand-in are left out."""
        rows: list[tuple[int, ...]] = []
        row_of: list[int] = []
        positions = self.positions = []
        allocator = _AllocatorTexts()
        for number, launch in enumerate(self._launches):
            row_of.append(len(rows))
            kind = launch.kind
            if kind > LaunchKind.HOST_READS:
                allocator.call(launch)
            elif kind == LaunchKind.HOST_READS and self._demands.has_launched(launch):
                rows.append(self._row(launch, LaunchKind.HOST_WAITS, work=-1, num_operations=0))
            elif LaunchKind.STREAM_RECORDS <= kind < LaunchKind.HOST_READS:
                rows.append(self._row(launch, kind, work=-1, num_operations=0))
            elif kind >= LaunchKind.COLLECTIVE or launch.call < 0:
                demanded = self._demands.of(number, self._tags.get(launch.tag, self._nowhere))
                work = self._work.setdefault(demanded, len(self._work))
                rows.append(self._row(launch, kind, work, self._operations_before(launch)))
            if len(rows) > len(positions):
                positions.append((number, kind == LaunchKind.HOST_READS and self._demands.has_launched(launch)))
                allocator.row(rows[-1][0])
        on_host = self._texts_of_host([*row_of, len(rows)], len(rows))
        columns = Columns(LaunchesRecord)
        texts = zip(rows, allocator.texts(), on_host, strict=True)
        columns.extend([(*row, self._text(called), self._text(worked)) for row, called, worked in texts])
        ranges = range_rows(self._ranges, [*row_of, len(rows)])
        work_rows = [_with_floats(work) for work in self._work]
        return columns.made(step=self._step, work_rows=work_rows, texts=list(self._texts), ranges=ranges)

    def _texts_of_host(self, row_of: Sequence[int], num_rows: int) -> list[str]:
        """Work on the host before each row, as ``LaunchesRecord.host_work`` has it. What follows the last is before
        the first, as in the step before.
        """
        texts = [""] * num_rows
        for position, work in self._host_work if num_rows else ():
            row = row_of[min(position, len(row_of) - 1)] % num_rows
            texts[row] += f"\n{work}" if texts[row] else str(work)
        return texts

    def _operations_before(self, launch: Launch) -> int:
        """Operations that began since the last launch. The host launches a graph as a whole, whatever is in it."""
        if launch.graph or launch.tag <= self._last_tag:
            return 0
        tags, between = self._tags, range(self._last_tag + 1, launch.tag + 1)
        self._last_tag = launch.tag
        return sum(1 for tag in between if tag in tags and tags[tag].counts)

    def _row(self, launch: Launch, kind: int, work: int, num_operations: int) -> tuple[int, ...]:
        tag = self._tags.get(launch.tag, self._nowhere)
        location = tag.location
        return (
            kind,
            work,
            launch.stream,
            launch.event,
            num_operations,
            launch.graph,
            launch.device,
            self._shape(tuple(launch.grid)),
            self._shape(tuple(launch.block)),
            tag.op,
            _PHASES[location.phase],
            location.recompute,
            location.layer,
            launch.call if kind == LaunchKind.COLLECTIVE else -1,
            min(launch.thread, _MOST_THREADS),
        )

    def _shape(self, sizes: _Shape) -> int:
        number = self._shapes.get(sizes)
        if number is None:
            number = self._shapes[sizes] = self._text(",".join(map(str, sizes)) if any(sizes) else "")
        return number

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))


class _AllocatorTexts:
    """The allocator's calls before each row, as ``LaunchesRecord.allocator`` has them."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: list[str] = []
        self._num_waits = 0  # rows at the end that wait

    def call(self, launch: Launch) -> None:
        """The allocator called CUDA. What it waited for right before it gave memory back, it waited for to do so."""
        name = ALLOCATOR_CALLS[launch.kind - LaunchKind.ALLOCATOR_IS_REFUSED]
        self._calls.append(f"{name} {launch.m} {launch.bytes}")
        if launch.kind in (LaunchKind.ALLOCATOR_FREES, LaunchKind.ALLOCATOR_UNMAPS):
            for row in range(len(self._texts) - self._num_waits, len(self._texts)):
                self._texts[row] = self._texts[row] or ALLOCATOR_WAITS

    def row(self, kind: int) -> None:
        """A row of this kind comes next."""
        self._texts.append(", ".join(self._calls))
        self._calls.clear()
        self._num_waits = self._num_waits + 1 if kind in _HOST_WAITS else 0

    def texts(self) -> list[str]:
        """The text of each row. The last one has what came after it, too."""
        if self._texts and self._calls:
            self._texts[-1] = ", ".join(filter(None, (self._texts[-1], *self._calls)))
        return self._texts


def _with_floats(work: WorkRow) -> WorkRow:
    """Floats where the record has floats: torch's formulas and sizes of elements are whole numbers."""
    return work._replace(
        flops=float(work.flops),
        moved_bytes=float(work.moved_bytes),
        a_bytes=float(work.a_bytes),
        b_bytes=float(work.b_bytes),
        d_bytes=float(work.d_bytes),
    )
