"""Tags of a timed step: the numbers by which the driver's log refers to operations and to what is between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from fakedist.gpu.demand.launch_demand import Tagged
from fakedist.gpu.demand.operation_demand import Demand
from fakedist.rundir.rows import Place


class Tags:
    """Gives tags, in the order in which they are asked for. All operations run in Python.

    Attributes:
        is_compiled: Whether compiled code may run operations while they are traced. It then tags them itself.
    """

    is_compiled = False

    def __init__(self) -> None:
        self.tag: Callable[[], int] = itertools.count().__next__

    def operation(self) -> int:
        """A tag for an operation that begins in Python in this thread."""
        return self.tag()

    def begin(self, set_tag: int, outside: Callable[[int], int]) -> None:
        """Begin a run.

        Args:
            set_tag: Address of the driver's function that takes this thread's tag.
            outside: Returns the tag outside of operations for a scope.
        """

    def switch(self, *, traced: bool, captured: bool) -> None:
        """Say whether a step is traced, and whether a graph is captured, whose operations run in Python."""

    def forget_outsides(self) -> None:
        """Ask again for tags outside of operations."""

    def learn(self, tag: int, operation: str, demand: Demand | None) -> None:
        """Learn what an operation demanded.

        Args:
            tag: Its tag.
            operation: Its name.
            demand: What each call of it with such arguments demands; None if that differs.
        """

    def called(self, tag: int) -> None:
        """This thread is in a function of an extension; -1 if it left them."""

    def take_scope(self) -> int:
        """Scope of this thread's last operation; -1 if it ran in Python, or was taken before."""
        return -1

    def take(self, place_of: Callable[[int], Place]) -> Iterator[tuple[int, Tagged]]:
        """The operations that compiled code ran in the step, by their tags.

        Args:
            place_of: Returns the place of a scope.
        """
        return iter(())
