"""The timed step's launches as the journal's record: what each has to do, and what the host did between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fakedist.gpu.demand.launch_demand import LaunchDemands, Tagged
from fakedist.gpu.launch_log import Launch, LaunchKind
from fakedist.gpu.step_ranges import StepRanges
from fakedist.run.encoding import Columns
from fakedist.run.launch_records import LaunchesRecord, WorkRow
from fakedist.run.rows import Place
from fakedist.run.schema import PHASES

_PHASES = {name: place for place, name in enumerate(PHASES)}
_Shape = tuple[int, ...]


class LaunchRows:
    """The launches of a step.

    Args:
        step: The step.
        launches: The log of it.
        tags: What its tags refer to.
        name: Returns the name of a launch.
        ranges: The script's ranges.
    """

    def __init__(
        self,
        step: int,
        launches: Sequence[Launch],
        tags: Mapping[int, Tagged],
        name: Callable[[Launch], str],
        *,
        ranges: StepRanges,
    ) -> None:
        self._step = step
        self._launches = launches
        self._tags = tags
        self._ranges = ranges
        self._demands = LaunchDemands(launches, tags, name)
        self._nowhere = Tagged(-1, "", Place(step, "other", 0, False), counts=False)
        self._work: dict[WorkRow, int] = {}
        self._texts: dict[str, int] = {"": 0}
        self._shapes: dict[_Shape, int] = {}
        self._last_tag = -1

    def record(self) -> LaunchesRecord:
        """The journal's record of them. Launches that are part of a collective's stand-in are left out."""
        rows: list[tuple[int, ...]] = []
        row_of = []
        for number, launch in enumerate(self._launches):
            row_of.append(len(rows))
            kind = launch.kind
            if kind == LaunchKind.HOST_READS and self._demands.has_launched(launch):
                rows.append(self._row(launch, LaunchKind.HOST_WAITS, work=-1, num_operations=0))
            elif LaunchKind.STREAM_RECORDS <= kind < LaunchKind.HOST_READS:
                rows.append(self._row(launch, kind, work=-1, num_operations=0))
            elif kind >= LaunchKind.COLLECTIVE or launch.call < 0:
                demanded = self._demands.of(number, self._tags.get(launch.tag, self._nowhere))
                work = self._work.setdefault(demanded, len(self._work))
                rows.append(self._row(launch, kind, work, self._operations_before(launch)))
        columns = Columns(LaunchesRecord)
        columns.extend(rows)
        ranges = self._ranges.rows([*row_of, len(rows)])
        work_rows = [_with_floats(work) for work in self._work]
        return columns.made(step=self._step, work_rows=work_rows, texts=list(self._texts), ranges=ranges)

    def _operations_before(self, launch: Launch) -> int:
        """Operations that began since the last launch. The host launches a graph as a whole, whatever is in it."""
        if launch.graph or launch.tag <= self._last_tag:
            return 0
        tags, between = self._tags, range(self._last_tag + 1, launch.tag + 1)
        self._last_tag = launch.tag
        return sum(1 for tag in between if tag in tags and tags[tag].counts)

    def _row(self, launch: Launch, what: int, work: int, num_operations: int) -> tuple[int, ...]:
        """The values of a row, in the order of the record's columns."""
        tag = self._tags.get(launch.tag, self._nowhere)
        place = tag.place
        return (
            what,
            work,
            launch.stream,
            launch.event,
            num_operations,
            launch.graph,
            launch.device,
            self._shape(tuple(launch.grid)),
            self._shape(tuple(launch.block)),
            tag.op,
            _PHASES[place.phase],
            place.recompute,
            place.layer,
            launch.call if what == LaunchKind.COLLECTIVE else -1,
        )

    def _shape(self, sizes: _Shape) -> int:
        found = self._shapes.get(sizes)
        if found is None:
            text = ",".join(map(str, sizes)) if any(sizes) else ""
            found = self._shapes[sizes] = self._texts.setdefault(text, len(self._texts))
        return found


def _with_floats(work: WorkRow) -> WorkRow:
    """The row with floats where its record has floats: torch's formulas and sizes of elements are whole numbers."""
    return work._replace(
        flops=float(work.flops),
        moved_bytes=float(work.moved_bytes),
        a_bytes=float(work.a_bytes),
        b_bytes=float(work.b_bytes),
        d_bytes=float(work.d_bytes),
    )
