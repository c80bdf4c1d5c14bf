"""What is known of a launch, recorded or traced, that may tell which launch of the other side it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from fakedist.analysis.traces.intervals import Ints

SignatureKind = Literal["kernel", "product", "library", "copy", "fill"]

#: Kernels that complete a product or prepare it. They are not the product itself.
_AUXILIARY = re.compile(r"split_?k\w*reduce|reduce_1block|scal_kernel|cublas\w*init|zero_?tile", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z_]\w*")
_TRITON_NUMBER = re.compile(r"(_\d+)+$")
#: Words of C++ that name no kernel.
_NOISE = frozenset(
    _WORDS.findall(
        "void at native anonymous namespace std array char unsigned int long float double bool const true false lambda "
        "detail Array c10 operator cuda cutlass TensorIteratorBase TensorIterator ul l"
    )
)


class Signature(NamedTuple):
    """What is known of a launch.

    Attributes:
        kind: A library's product or other call, whose kernels are not known, or the launch itself. A trace has
            kernels, copies and fills.
        name: The kernel, "Memcpy HtoD", "Memset", or the library's function.
        family: One of ``run.schema.FAMILIES``.
        operations: Names such as "aten::mm": recorded, the operation that launched it; traced, all operations around
            the launch, innermost first. Empty if unknown.
        grid: Blocks as x,y,z; empty if unknown.
        num_bytes: Bytes of a copy or fill; -1 if unknown.
        sizes: The sizes of a product: the smaller and the larger of m and n, and k; empty if unknown.
    """

    kind: SignatureKind
    name: str
    family: str
    operations: tuple[str, ...] = ()
    grid: str = ""
    num_bytes: int = -1
    sizes: tuple[int, ...] = ()

    @property
    def is_tuned(self) -> bool:
        """Whether its grid depends on tuning, and not on its work alone."""
        return self.name.startswith("triton_")

    @property
    def is_auxiliary(self) -> bool:
        """Whether it completes a product of a library, such as the sum over parts of k."""
        return self.kind == "kernel" and _AUXILIARY.search(self.name) is not None


@dataclass(frozen=True)
class Sequence:
    """Launches in the order in which the host made them.

    Attributes:
        signatures: Distinct signatures.
        signature: The row of ``signatures`` of each launch.
    """

    signatures: list[Signature]
    signature: Ints

    def __len__(self) -> int:
        return len(self.signature)

    @classmethod
    def of(cls, launches: list[Signature]) -> Sequence:
        """The sequence of these launches."""
        places: dict[Signature, int] = {}
        rows = [places.setdefault(each, len(places)) for each in launches]
        return cls(list(places), np.array(rows, np.int64))

    def of_families(self, *families: str) -> Ints:
        """Positions of the launches of these families, without those that only complete another."""
        wanted = np.array([each.family in families and not each.is_auxiliary for each in self.signatures] or [False])
        return np.flatnonzero(wanted[self.signature]) if len(self) else np.zeros(0, np.int64)


def operation_name(text: str) -> str:
    """An operation as a trace names it: ``aten.mm.default`` is ``aten::mm``."""
    parts = text.split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 2 and "::" not in text else text


@cache
def kernel_words(name: str) -> frozenset[str]:
    """The words of a kernel's name that tell what it computes. They stay the same between releases of torch."""
    return frozenset(_WORDS.findall(name)) - _NOISE


def plain_name(name: str) -> str:
    """A kernel's name without what Inductor numbers anew in each graph, a copy's without the kind of host memory."""
    if name.startswith("triton_"):
        return _TRITON_NUMBER.sub("", name)
    if name.startswith("Memcpy"):
        return " ".join(name.split(" ")[:2])
    return "Memset" if name.startswith("Memset") else name
