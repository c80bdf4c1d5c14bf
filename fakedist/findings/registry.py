"""The rules of findings: what one sees, and the registry of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from fakedist.docstrings import docstring_of

if TYPE_CHECKING:
    from types import FunctionType

    from fakedist.findings.case import Case


@dataclass(frozen=True)
class Fault:
    """A fault that a rule saw in a run, as :class:`fakedist.rundir.finding.Finding` has it.

    Attributes:
        gives_bytes: The least and the most; likewise ``gives_us``.
        costs_bytes: Bytes that the fault takes, where what it gives is not known; likewise ``costs_us``.
    """

    text: str
    change: str
    line: str = ""
    gives_bytes: tuple[int, int] | None = None
    gives_us: tuple[float, float] | None = None
    costs_bytes: int = 0
    costs_us: float = 0.0
    is_certain: bool = True
    advice: str = ""


Find: TypeAlias = "Callable[[Case], Iterator[Fault]]"
FindInJob: TypeAlias = "Callable[[Mapping[int, Case]], Iterator[Fault]]"
_Find = TypeVar("_Find", bound="Find | FindInJob")


@dataclass(frozen=True)
class FaultRule:
    """A rule. Its page is the docstring of the function that finds the fault."""

    code: str
    name: str
    #: Tables without which it cannot say anything.
    needs: tuple[str, ...]
    find: Find | FindInJob
    #: Whether it reads several ranks of a job, by their numbers, and not one.
    of_job: bool = False

    @property
    def page(self) -> str:
        """Why the fault matters, how it is seen, and what mends it, as Markdown."""
        function: FunctionType = self.find  # type: ignore[assignment]
        return docstring_of(function)


#: Every rule by its code.
RULES: dict[str, FaultRule] = {}


def rule(code: str, name: str, *needs: str, of_job: bool = False) -> Callable[[_Find], _Find]:
    """Register a function as the rule of a code."""

    def register(find: _Find) -> _Find:
        assert code not in RULES, code
        RULES[code] = FaultRule(code, name, needs, find, of_job)
        return find

    return register
