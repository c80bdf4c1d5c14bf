"""Sizes of products and attentions, as :mod:`fakedist.rundir.launch_records` has them in rows of work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from fakedist.gpu.values.operators import Operator
from fakedist.gpu.values.tensors import Arguments, Keywords

Direction = Literal["forward", "backward"]


class ProductShape(NamedTuple):
    """A product (m, k) x (k, n), ``batch`` times; or several products, one for each group.

    ``m`` has the rows of all groups together, ``n`` the columns and ``k`` the length of the sums of each; ``groups`` is
    0 for one product. ``a_bytes``, ``b_bytes``, ``d_bytes``: of an element of the operands and the result, 0 if
    unknown. ``layout`` and ``scaling`` as in ``WorkRow``.
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
        """The shape with the element bytes of its operands and result; the first stands for unknown ones."""
        sizes = [float(getattr(operand, "itemsize", 0.0)) for operand in operands]
        first = next(filter(None, sizes), 0.0)
        a, b, d = (size or first for size in (*sizes, 0.0, 0.0, 0.0)[:3])
        return self._replace(a_bytes=a, b_bytes=b, d_bytes=d)

    @property
    def flops(self) -> float:
        """Floating-point operations of the work."""
        return 2.0 * self.m * self.n * self.k * self.batch


class AttentionShape(NamedTuple):
    """An attention; ``library`` as ``WorkRow.library``. ``queries`` and ``keys`` are of a sequence, widths of a head.

    Attributes:
        batch: Sequences. Packed sequences of several lengths count as equal ones with the same arithmetic.
        window: The most keys that a query meets; 0 without a window. Of flex_attention: the mean, in whole blocks.
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
        """Two products forward, five backward; one of the five computes the scores again. A query has ``met`` keys."""
        widths = self.width + self.value_width
        if self.direction == "backward":
            widths = 3 * self.width + 2 * self.value_width
        return 2.0 * self.batch * self.heads * self.queries * met * widths

    def masked_flops(self, mask: Mask, sizes: object) -> float:
        """FLOPs without those that a mask spares. ``sizes`` are the lengths of packed sequences, if they are known."""
        if isinstance(sizes, Lengths):
            return self._replace(batch=1, queries=1).flops(sizes.met_pairs(mask))
        return self.flops(mask.met_keys(self.queries, self.keys))


class Mask(NamedTuple):
    """The keys that a query meets: up to its own position if ``causal``, at most ``left`` before it and ``right`` after
    it.

    -1 is all. ``from_end``: the last query's position is the last key's; otherwise the first query's is the first
    key's.
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
    """Lengths of each sequence."""

    queries: Sequence[int]
    keys: Sequence[int]

    @classmethod
    def between(cls, queries: Sequence[int] | None, keys: Sequence[int] | None) -> Lengths | None:
        """Pair lengths of queries and keys; None if their numbers differ, or one is not known."""
        return None if queries is None or keys is None or len(queries) != len(keys) else cls(queries, keys)

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


#: Returns a tensor's values, or None if no kernel computed them.
Known = Callable[[torch.Tensor], "torch.Tensor | None"]
#: These take (batch, heads, tokens, width). The others take (batch, tokens, heads, width), or (tokens, heads, width) of
#: packed sequences.
_HEADS_FIRST = ("_scaled_dot_product", "_cudnn_attention")
_LIBRARIES = (("cudnn", "cudnn"), ("efficient", "efficient"), ("flash", "flash2"))
#: Names of the offsets of packed sequences, without the side.
_OFFSETS = ("cum_seq", "cu_seqlens", "cu_seq")
#: What ``torch.nn.attention.varlen`` passes as ``backend``: torch.nn.attention.SDPBackend.
_VARLEN_LIBRARIES: dict[object, str] = {1: "flash2", 3: "cudnn"}
#: flash-attn's causal masks end with the last key, as those of efficient attention's second kind do.
_FROM_END = 2


def packed_lengths(offsets: object, known: Known) -> list[int] | None:
    """Lengths of packed sequences from where they begin; None if no kernel computed that."""
    values = known(offsets) if isinstance(offsets, torch.Tensor) and offsets.numel() else None
    if values is None:
        return None
    return [max(after - before, 0) for before, after in itertools.pairwise(int(end) for end in values.tolist())]


class AttentionDemand(NamedTuple):
    """The sizes of an attention, and its floating-point operations without those that the mask spares."""

    shape: AttentionShape
    flops: float


class AttentionOperator:
    """Reads the sizes of an attention from its operation's arguments. ``known`` returns packed sequences' offsets."""

    def __init__(self, operator: Operator, known: Known) -> None:
        self._operator, self._known = operator, known
        name = operator.name
        self._heads_first = name.startswith(_HEADS_FIRST)
        self._direction = "backward" if "backward" in name or name.endswith("bwd") else "forward"
        namespace = operator.qualified_name.partition("::")[0]
        named_library = next((library for word, library in _LIBRARIES if word in name or word in namespace), "")
        self._is_varlen = namespace == "torch_attn"
        self._library = "flash3" if namespace.startswith("flash_attn_3") else named_library
        self._is_extension = namespace.startswith("flash_attn")

    @staticmethod
    def reads(operator: Operator) -> bool:
        """Return whether an operation is such an attention."""
        namespace, _, name = operator.qualified_name.partition("::")
        if namespace.startswith("flash_attn"):
            return "flash_attn" in name or name.split(".")[0] in ("fwd", "bwd")
        if namespace == "torch_attn":  # PyTorch's own for packed sequences, which it runs as one operation
            return "varlen_attn" in name
        return operator.is_kernel and "attention" in name and not name.startswith("_fused")

    def demand(self, args: Arguments, kwargs: Keywords) -> AttentionDemand | None:
        """The demand of one call. None if its arguments are not those of a known release."""

        def argument(*names: str) -> object:
            values = (self._operator.argument(name, args, kwargs) for name in names)
            return next((value for value in values if value is not None), None)

        query, key, value = argument("query", "q"), argument("key", "k"), argument("value", "v")
        if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
            return None
        library = _VARLEN_LIBRARIES.get(argument("backend"), "flash2") if self._is_varlen else self._library
        mask = self._mask(argument, library)
        sizes = self._sizes(query, key, argument)
        batch, queries, keys = sizes if not isinstance(sizes, Lengths) else sizes.equal()
        at = 1 if self._heads_first else -2
        shape = AttentionShape(
            direction="backward" if self._direction == "backward" else "forward",
            library=library,
            batch=batch,
            heads=int(query.shape[at]),
            kv_heads=int(key.shape[at]),
            queries=queries,
            keys=keys,
            width=int(query.shape[-1]),
            value_width=int(value.shape[-1]),
            causal=mask.causal,
            window=mask.window,
            dropout=bool(argument("dropout_p")),
            deterministic=self._is_deterministic(argument("deterministic")),
        )
        return AttentionDemand(shape, shape.masked_flops(mask, sizes))

    def _is_deterministic(self, asked: object) -> bool:
        if self._direction == "forward" or self._library == "efficient":
            return False
        return bool(asked) or torch.are_deterministic_algorithms_enabled()

    def _mask(self, argument: Callable[..., object], library: str) -> Mask:
        custom = argument("custom_mask_type")
        causal = bool(argument("is_causal", "causal")) or bool(custom)
        from_end = custom == _FROM_END or self._is_extension or library == "flash2"
        window = argument("window_size")
        if isinstance(window, (list, tuple)) and len(window) == 2:
            return Mask(causal or window[1] == 0, int(window[0]), int(window[1]), from_end)
        if isinstance(window, int) and window > 0:  # efficient attention counts the query's own position
            return Mask(causal, left=window - 1, from_end=from_end)
        left, right = argument("window_size_left"), argument("window_size_right")
        left, right = (side if isinstance(side, int) else -1 for side in (left, right))
        return Mask(causal, left, right, from_end)

    def _sizes(
        self, query: torch.Tensor, key: torch.Tensor, argument: Callable[..., object]
    ) -> tuple[int, int, int] | Lengths:
        if self._heads_first and query.dim() == 4:
            return int(query.shape[0]), int(query.shape[2]), int(key.shape[2])
        offsets = [argument(*(f"{name}_{side}" for name in _OFFSETS)) for side in "qk"]
        lengths = [packed_lengths(tensor, self._known) for tensor in offsets]
        used = argument("seqused_k")
        if isinstance(used, torch.Tensor):  # a cache of keys, of which so many are met
            values = self._known(used)
            lengths[1] = None if values is None else [int(length) for length in values.tolist()]
        if (packed_ones := Lengths.between(*lengths)) is not None:
            return packed_ones
        longest = argument("max_q", "max_seqlen_q"), argument("max_k", "max_seqlen_k")
        packed = query.dim() == 3 or (isinstance(offsets[0], torch.Tensor) and offsets[0].numel() > 0)
        if packed and isinstance(longest[0], int) and isinstance(longest[1], int) and longest[0]:
            return max(round(int(query.shape[:-2].numel()) / longest[0]), 1), longest[0], longest[1]
        if query.dim() == 3:
            return 1, int(query.shape[0]), int(key.shape[0])
        return int(query.shape[0]), int(query.shape[1]), int(key.shape[1])
