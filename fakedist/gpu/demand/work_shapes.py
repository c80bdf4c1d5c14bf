"""Sizes of what an operation computes, as the rows of work have them (:mod:`fakedist.rundir.launch_records`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]


class ProductShape(NamedTuple):
    """A product (m, k) x (k, n), ``batch`` times; or several products, one for each group.

    Attributes:
        m: Rows of the result; of all groups together.
        n: Columns of the result; of each group.
        k: Length of the sums; of each group.
        batch: How many of one size.
        groups: Number of groups; 0 for other products.
        layout: As ``WorkRow.layout``.
        a_bytes: Bytes of an element of the first operand; 0 if unknown.
        b_bytes: Of the second.
        d_bytes: Of the result.
        scaling: As ``WorkRow.scaling``.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 0
    layout: str = ""
    a_bytes: float = 0.0
    b_bytes: float = 0.0
    d_bytes: float = 0.0
    scaling: str = ""

    def of(self, *operands: object) -> ProductShape:
        """The shape with the bytes of elements of its operands and its result, as far as they are tensors. An operand
        that is not known counts as the first, the result, too.
        """
        sizes = [float(getattr(operand, "itemsize", 0.0)) for operand in operands]
        first = next(filter(None, sizes), 0.0)
        a, b, d = (size or first for size in (*sizes, 0.0, 0.0, 0.0)[:3])
        return self._replace(a_bytes=a, b_bytes=b, d_bytes=d)

    @property
    def flops(self) -> float:
        """Its floating-point operations."""
        return 2.0 * self.m * self.n * self.k * self.batch


class AttentionShape(NamedTuple):
    """An attention.

    Attributes:
        direction: Forward or backward.
        library: As ``WorkRow.library``.
        batch: Sequences. Packed sequences of several lengths count as equal ones with the same arithmetic.
        heads: Query heads of a sequence.
        kv_heads: Key and value heads.
        queries: Queries of a sequence.
        keys: Keys of a sequence.
        width: Width of a query's head.
        value_width: Width of a value's head.
        causal: Whether each query meets only the keys before it.
        window: The most keys that a query meets; 0 without a window. Of flex_attention: the mean, in whole blocks.
        dropout: Whether it leaves out scores at random.
        deterministic: Whether its backward adds up gradients in a fixed order.
    """

    direction: Direction
    library: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    causal: bool = False
    window: int = 0
    dropout: bool = False
    deterministic: bool = False

    def flops(self, met: float) -> float:
        """Two products forward, five backward; one of the five computes the scores again.

        Args:
            met: Keys that a query meets, on average.
        """
        widths = self.width + self.value_width
        if self.direction == "backward":
            widths = 3 * self.width + 2 * self.value_width
        return 2.0 * self.batch * self.heads * self.queries * met * widths


class Mask(NamedTuple):
    """Which keys a query meets.

    Attributes:
        causal: Only those up to its own position.
        left: At most so many before its own position; -1 for all.
        right: At most so many after it; -1 for all.
        from_end: Whether the last query's position is the last key's; otherwise the first query's is the first key's.
    """

    causal: bool = False
    left: int = -1
    right: int = -1
    from_end: bool = False

    @property
    def window(self) -> int:
        """The most keys that a query meets; 0 without a window."""
        right = 0 if self.causal else self.right
        return self.left + 1 + right if self.left >= 0 and right >= 0 else 0

    def met_keys(self, queries: int, keys: int) -> float:
        """Keys that a query meets, on average."""
        if not queries:
            return 0.0
        right = 0 if self.causal else self.right
        offset = keys - queries if self.from_end else 0
        last = float(keys * queries) if right < 0 else _clamped_sum(offset + right + 1, keys, queries)
        first = 0.0 if self.left < 0 else _clamped_sum(offset - self.left, keys, queries)
        return max(last - first, 0.0) / queries


class Lengths(NamedTuple):
    """Lengths of sequences.

    Attributes:
        queries: Of each sequence.
        keys: Of each sequence.
    """

    queries: Sequence[int]
    keys: Sequence[int]

    def equal(self) -> tuple[int, int, int]:
        """Batch, queries and keys of equal sequences with as many queries, and as many pairs of queries and keys."""
        total, num_keys = sum(self.queries), sum(self.keys)
        pairs = sum(queries * keys for queries, keys in zip(self.queries, self.keys, strict=True))
        if not total or not pairs:
            return 0, 0, 0
        batch = max(round(total * num_keys / pairs), 1)
        return batch, round(total / batch), round(pairs / total)

    def met_pairs(self, mask: Mask) -> float:
        """Pairs of queries and the keys that they meet."""
        both = zip(self.queries, self.keys, strict=True)
        return sum(queries * mask.met_keys(queries, keys) for queries, keys in both)


def _clamped_sum(first: int, most: int, count: int) -> float:
    """The sum of ``first``, ``first + 1``, ... (``count`` numbers), each taken as at least 0 and at most ``most``."""
    zeros = min(max(-first, 0), count)
    ends = min(max(most - first, zeros), count)  # where the numbers reach ``most``
    rising = ends - zeros
    return rising * (first + zeros + first + ends - 1) / 2 + (count - ends) * most
