"""What attentions have to do: PyTorch's own operations, and those of the flash-attn packages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from fakedist.gpu.demand.work_shapes import AttentionShape, Lengths, Mask
from fakedist.gpu.values.arguments import Arguments, Keywords
from fakedist.gpu.values.operators import Operator

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


class AttentionDemand(NamedTuple):
    """What an attention has to do.

    Attributes:
        shape: Its sizes.
        flops: Floating-point operations, without those that the mask spares.
    """

    shape: AttentionShape
    flops: float


class AttentionOperator:
    """Reads the sizes of an attention from the arguments of its operation.

    Args:
        operator: The operation.
        known: Returns a tensor's values: those of packed sequences' offsets.
    """

    def __init__(self, operator: Operator, known: Known) -> None:
        self._operator, self._known = operator, known
        name = operator.name
        self._heads_first = name.startswith(_HEADS_FIRST)
        self._direction = "backward" if "backward" in name or name.endswith("bwd") else "forward"
        namespace = operator.qualified_name.partition("::")[0]
        found = next((library for word, library in _LIBRARIES if word in name or word in namespace), "")
        self._is_varlen = namespace == "torch_attn"
        self._library = "flash3" if namespace.startswith("flash_attn_3") else found
        self._is_extension = namespace.startswith("flash_attn")

    @staticmethod
    def reads(operator: Operator) -> bool:
        """Whether an operation is such an attention."""
        namespace, _, name = operator.qualified_name.partition("::")
        if namespace.startswith("flash_attn"):
            return "flash_attn" in name or name.split(".")[0] in ("fwd", "bwd")
        if namespace == "torch_attn":  # PyTorch's own for packed sequences, which it runs as one operation
            return "varlen_attn" in name
        return operator.is_kernel and "attention" in name and not name.startswith("_fused")

    def demand(self, args: Arguments, kwargs: Keywords) -> AttentionDemand | None:
        """What one call has to do. None if its arguments are others than those that are known."""

        def argument(*names: str) -> object:
            found = (self._operator.argument(name, args, kwargs) for name in names)
            return next((value for value in found if value is not None), None)

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
        if isinstance(sizes, Lengths):
            return AttentionDemand(shape, shape._replace(batch=1, queries=1).flops(sizes.met_pairs(mask)))
        return AttentionDemand(shape, shape.flops(mask.met_keys(queries, keys)))

    def _is_deterministic(self, asked: object) -> bool:
        """Whether a backward is deterministic: by its own argument, or as torch was told."""
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
        """Batch, queries and keys; or the lengths of packed sequences."""
        if self._heads_first and query.dim() == 4:
            return int(query.shape[0]), int(query.shape[2]), int(key.shape[2])
        offsets = [argument(*(f"{name}_{side}" for name in _OFFSETS)) for side in "qk"]
        lengths = [self._lengths(each) for each in offsets]
        used = argument("seqused_k")
        if isinstance(used, torch.Tensor):  # a cache of keys, of which so many are met
            values = self._known(used)
            lengths[1] = None if values is None else [int(length) for length in values.tolist()]
        if lengths[0] is not None and lengths[1] is not None and len(lengths[0]) == len(lengths[1]):
            return Lengths(lengths[0], lengths[1])
        longest = argument("max_q", "max_seqlen_q"), argument("max_k", "max_seqlen_k")
        packed = query.dim() == 3 or (isinstance(offsets[0], torch.Tensor) and offsets[0].numel() > 0)
        if packed and isinstance(longest[0], int) and isinstance(longest[1], int) and longest[0]:
            tokens = int(query.shape[:-2].numel())
            return max(round(tokens / longest[0]), 1), longest[0], longest[1]
        if query.dim() == 3:
            return 1, int(query.shape[0]), int(key.shape[0])
        return int(query.shape[0]), int(query.shape[1]), int(key.shape[1])

    def _lengths(self, offsets: object) -> list[int] | None:
        if not isinstance(offsets, torch.Tensor) or not offsets.numel():
            return None
        values = self._known(offsets)
        if values is None:
            return None
        ends = [int(end) for end in values.tolist()]
        return [max(after - before, 0) for before, after in itertools.pairwise(ends)]
