"""Which operations may run in compiled code: those for which the value engine would do nothing but run them.

A rule says what ``fast_path.cpp`` looks at. It follows :mod:`fakedist.gpu.values.engine` case by case; what a rule does
not allow runs there.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fakedist.gpu.values.choices import CHOOSING
from fakedist.gpu.values.composites import Composites
from fakedist.gpu.values.following import CONDENSING
from fakedist.gpu.values.host_reads import INDEXING, READS
from fakedist.gpu.values.operators import LISTED, Operator
from fakedist.gpu.values.shares import COUNTING, FOLLOWING, NON_NEGATIVE, followed_name


class Method(enum.IntEnum):
    """How compiled code decides. The same numbers as in ``fast_path.cpp``."""

    PYTHON = 0
    PLAIN = 1
    KERNEL = 2
    LISTS = 3


class Flag(enum.IntFlag):
    """What else it looks at. ``fast_path.cpp`` says what each means."""

    NONE = 0
    FOLLOWED = 1
    HOST_ONLY = 2
    POSITIONS = 4
    COPIES = 8
    OVERWRITES = 16
    CONDENSES = 32
    COUNTS = 64
    MAKES_MASK = 128
    IS_VIEW = 256
    IS_GEMM = 512
    LOOKS_ON = 1024


@dataclass(frozen=True)
class Rule:
    """When an operation may run in compiled code."""

    method: Method
    flags: Flag = Flag.NONE


#: Torch runs all operations alone: on a real GPU, and where no values are followed.
EVERYTHING = Rule(Method.PLAIN)


def rule_of(operator: Operator, composites: Composites) -> Rule:
    """The rule for an operator on the virtual GPU, whose small tensors have values."""
    name = operator.name
    if (method := composites.method(operator)) is not None:
        may_pass = method == composites.perhaps_viewed and _takes_one_tensor(operator)
        return Rule(Method.KERNEL if may_pass else Method.PYTHON)
    if name == "empty":
        return Rule(Method.PLAIN, Flag.MAKES_MASK)
    if operator.is_view or operator.empty or operator.is_idle:
        return Rule(Method.PLAIN)
    if not operator.is_kernel or operator.reads_midway:
        return Rule(Method.PYTHON)
    overwrites = Flag.OVERWRITES if operator.overwrites else Flag.NONE
    if name.startswith(LISTED):
        return Rule(Method.PYTHON) if name in NON_NEGATIVE else Rule(Method.LISTS, overwrites)
    if name in ("lift", "lift_fresh"):
        return Rule(Method.KERNEL, Flag.HOST_ONLY)
    followed = followed_name(name)
    is_certain = operator.followed and followed not in FOLLOWING
    is_read = name not in INDEXING and (operator.dynamic or name in READS)
    if is_read or is_certain or operator.like or name in CHOOSING:
        return Rule(Method.KERNEL, Flag.HOST_ONLY)
    flags = overwrites
    if operator.followed:
        flags |= Flag.FOLLOWED
    if followed in COUNTING:
        flags |= Flag.COUNTS
    if name in CONDENSING:
        flags |= Flag.CONDENSES
    if name in ("copy_", "_to_copy"):
        flags |= Flag.COPIES
    if name in INDEXING:
        flags |= Flag.POSITIONS
    return Rule(Method.KERNEL, flags)


def _takes_one_tensor(operator: Operator) -> bool:
    """Whether no second tensor says where the result goes, as in ``to.other``."""
    return sum("Tensor" in str(argument.type) for argument in operator.func._schema.arguments) == 1
