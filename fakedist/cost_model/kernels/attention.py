"""Times of attention, forward and backward, by the library that computes it.

- *cudnn*: measured on H200 and GB200, with and without a causal mask, at many heads. The achieved fraction of the peak
  is interpolated over tokens for the nearest head width; GPUs of the same compute capability share it. The effect of
  another width comes from the inference table (64 to 512).
- *flash2*: FlashAttention-2, which PyTorch builds in. On Hopper and newer it is slower than cuDNN by the quotient that
  the FlashAttention-3 paper measured on an H100; on Ampere and Ada it is the inference table's.
- *flex*, *efficient*: a fraction of FlashAttention-2's rate.
- *inference*: causal forwards of FlashAttention-3, TensorRT-LLM and others, by tokens and heads of all sequences. For
  all kinds, it also has the slowdown of few heads.

Training was measured from 2,048 tokens on. Inference kernels of fewer tokens also write the KV cache, which takes
longer than they attend: at 512 tokens a FLOP of theirs takes four times as long as at 2,048, and one of cuDNN's or
FlashAttention-2's 1.2 times forward, 1.4 to 1.5 times backward (the FlashAttention-3 paper). So shorter sequences slow
down as those do.

Without a measured backward (Ampere and Ada), FLOPs run at the fraction of the forward's rate that the FlashAttention-2
paper gives for A100. A window counts with the keys that it leaves, at the rate of a causal sequence twice as long;
blocks of keys, at the rate of all that a query meets. Queries and keys of different length take the rate of their
geometric mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.cost_model.kernels.measurements import Floats, Integers, fill_gaps, interpolate

AttentionKernel = Literal["cudnn", "flash2", "flex", "efficient", "inference"]

_START_US = 4.0
_ELEMENT_BYTES = 2.0
_ACHIEVED_BANDWIDTH = 0.8
#: FLOP/s of FlashAttention-2 over cuDNN on H100, head width 128, without a mask, by tokens (arXiv:2407.08608, figures
#: "Attention forward/backward speed").
_FLASH_2_TOKENS = np.log([512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0])
_FLASH_2_FORWARD = np.array([0.312, 0.354, 0.366, 0.372, 0.374, 0.374]) / np.array(
    [0.502, 0.580, 0.624, 0.616, 0.606, 0.601]
)
_FLASH_2_BACKWARD = np.array([0.216, 0.263, 0.294, 0.313, 0.321, 0.325]) / np.array(
    [0.308, 0.412, 0.470, 0.504, 0.524, 0.522]
)
#: Sequences from here on were measured. A FLOP of a shorter one takes as much longer as if each query met so many more
#: keys. Fitted to the same figures at 512 and 2,048 tokens; at 1,024 they differ by 3 %.
_LONG = 2048.0
_MORE_KEYS = {"cudnn": (180.0, 436.0), "flash2": (126.0, 280.0)}
#: Rates of forward and backward over FlashAttention-2's. flex_attention: 0.90 and 0.85, pytorch.org/blog/flexattention.
#: The memory-efficient kernel (xFormers' CUTLASS): an assumption, about half as in the FlashAttention-2 paper's
#: figures.
_OVER_FLASH_2 = {"flex": (0.90, 0.85), "efficient": (0.5, 0.5)}
#: FLOPs of backward over forward (five products against two), and the rate of FlashAttention-2's backward over its
#: forward on A100: 63 % and 73 % of the peak (arXiv:2307.08691).
_BACKWARD_FLOPS = 2.5
_BACKWARD_RATE = 0.63 / 0.73
#: cuDNN was measured with at least this many heads in all, which fill the GPU.
_MANY_HEADS = 64
#: A window of 1,024 (H200) costs what its FLOPs do, one of 128 (GB200) four times that.
_WIDE_WINDOW, _WINDOW_POWER = 1024.0, 2 / 3
#: A width this much (logarithm) from every measured one takes the difference from the inference table.
_SAME_WIDTH = 0.25


@dataclass(frozen=True)
class AttentionRoof:
    """A GPU's limits for attention: the bf16 peak in FLOP/s, the memory bandwidth in bytes per second."""

    peak_flops: float
    memory_bandwidth: float


@dataclass(frozen=True)
class AttentionShapes:
    """Attentions to estimate; arrays of one length.

    Attributes:
        causal: Each query meets only the keys before it.
        window: The most keys that a query meets; 0 without a window.
        in_blocks: Keys are whole blocks, the number that a query meets on average, as in flex_attention. No tile is
            cut.
        slowdown: Arithmetic in their type takes so many times as long as in bf16.
        element_bytes: Bytes of an element.
    """

    batch: Integers
    heads: Integers
    kv_heads: Integers
    queries: Integers
    keys: Integers
    width: Integers
    value_width: Integers
    causal: npt.NDArray[np.bool_]
    window: Integers
    in_blocks: npt.NDArray[np.bool_]
    slowdown: Floats | float = 1.0
    element_bytes: Floats | float = _ELEMENT_BYTES

    @classmethod
    def of_itself(
        cls, batch: Integers, heads: Integers, kv_heads: Integers, tokens: Integers, width: Integers, *, causal: bool
    ) -> AttentionShapes:
        """Self-attentions without a window, as they were measured."""
        none = np.zeros_like(tokens)
        flags = np.full(len(tokens), causal)
        return cls(batch, heads, kv_heads, tokens, tokens, width, width, flags, none, np.full(len(tokens), False))

    def met_keys(self) -> Floats:
        """Average keys that a query meets. A causal mask is aligned to the upper left corner, as PyTorch's is."""
        queries, keys = self.queries.astype(float), self.keys.astype(float)
        limit = np.where(self.window > 0, np.minimum(self.window, keys), keys)
        rising = np.minimum(queries, limit)  # the first queries meet 1, 2, ... keys, the rest as many as the limit
        causal = (rising * (rising + 1) / 2 + (queries - rising) * limit) / queries
        return np.asarray(np.where(self.causal, causal, limit))

    def slowed_by_window(self) -> Floats:
        """Slowdown of a FLOP, because tiles that a narrow window cuts are visited whole."""
        narrow = (self.window > 0) & (self.window < self.keys) & ~self.in_blocks
        window = np.where(narrow, self.window, _WIDE_WINDOW)
        return np.asarray(np.maximum((_WIDE_WINDOW / window) ** _WINDOW_POWER, 1.0))

    def flops(self, direction: Literal["forward", "backward"] = "forward") -> Floats:
        """FLOPs: two products forward, five backward, of which one repeats the scores."""
        forward = direction == "forward"
        widths = self.width + self.value_width if forward else 3.0 * self.width + 2.0 * self.value_width
        return np.asarray(2.0 * self.batch * self.heads * self.queries * self.met_keys() * widths)

    def length(self) -> Floats:
        """Tokens of a self-attention with as many pairs of queries and keys."""
        return np.asarray(np.sqrt(self.queries.astype(float) * self.keys))

    def at_least(self, tokens: float) -> AttentionShapes:
        """Lengthen queries and keys to at least this."""
        longer = np.maximum(tokens / self.length(), 1.0)
        queries, keys = (np.ceil(each * longer).astype(np.int64) for each in (self.queries, self.keys))
        return replace(self, queries=queries, keys=keys)

    def moved_bytes(self) -> Floats:
        """The fewest bytes that the forward reads and writes. The backward's are twice as many."""
        queries = self.heads * self.queries * (self.width + self.value_width)
        keys = self.kv_heads * self.keys * (self.width + self.value_width)
        return np.asarray(self.batch * (queries + keys) * self.element_bytes, np.float64)

    def like_tokens(self) -> Floats:
        """Tokens of the self-attention whose rate counts."""
        times = np.where(self.in_blocks, 1, 2)
        keys = np.where(self.window > 0, np.minimum(self.keys, times * self.window), self.keys).astype(float)
        own = np.where(self.window > 0, keys, self.queries)
        return np.asarray(np.sqrt(keys * np.maximum(own, 1.0)))

    def mean_width(self) -> Floats:
        """Mean of the queries' and the values' width."""
        return np.asarray((self.width + self.value_width) / 2.0)


class AttentionTimes:
    """Estimates attention on one GPU.

    Args:
        inference: Measured forwards (``Measured.attention``).
        training: cuDNN's forwards and backwards (``Measured.training_attention``) of its compute capability; may be
            empty.
        measured_on: The limits of the GPU of ``inference``.
        training_peak_flops: The bf16 peak of the GPU of ``training``.
    """

    def __init__(
        self,
        inference: pd.DataFrame,
        training: pd.DataFrame,
        measured_on: AttentionRoof,
        *,
        training_peak_flops: float = 1.0,
    ) -> None:
        self._roof = measured_on
        columns = (inference[name].to_numpy() for name in ("batch", "heads", "kv_heads", "tokens", "width"))
        own = AttentionShapes.of_itself(*columns, causal=True)
        quotient = np.log(inference["time_us"].to_numpy() / _reference_us(own, measured_on))
        table = inference.assign(quotient=quotient, all_heads=own.batch * own.heads)
        self._inference = _Grids(table, "width", ["tokens", "all_heads"])
        self._cudnn = _cudnn_grids(training, training_peak_flops)

    @property
    def has_training(self) -> bool:
        """True if forward and backward of training were measured."""
        return self._cudnn is not None

    def forward_us(self, shapes: AttentionShapes, kernel: AttentionKernel, roof: AttentionRoof | None = None) -> Floats:
        """Microseconds of each forward; ``roof`` has the limits of another GPU of the same architecture."""
        limits = roof or self._roof
        if kernel == "inference":
            return self._inference_us(shapes, limits)
        return self._training_us(shapes, kernel, limits, is_backward=False)

    def backward_us(
        self, shapes: AttentionShapes, kernel: AttentionKernel, roof: AttentionRoof | None = None
    ) -> Floats:
        """Microseconds of each backward; ``roof`` has the limits of another GPU of the same architecture."""
        return self._training_us(shapes, kernel, roof or self._roof, is_backward=True)

    def _training_us(
        self, shapes: AttentionShapes, kernel: AttentionKernel, roof: AttentionRoof, *, is_backward: bool
    ) -> Floats:
        """The time at a length that was measured, less by the FLOPs of a shorter one; at least what its bytes take."""
        long = shapes.at_least(_LONG)
        direction: Literal["forward", "backward"] = "backward" if is_backward else "forward"
        if self._cudnn is None:
            more_keys = _MORE_KEYS["flash2"]
            slower = np.ones((2, len(shapes.keys)))  # the rate of what was measured
            long_us = self._inference_us(long, roof) * (_BACKWARD_FLOPS / _BACKWARD_RATE if is_backward else 1.0)
        else:
            more_keys = _MORE_KEYS["cudnn"]
            slower = _slower(shapes, kernel)
            long_us = self._cudnn_us(long, "bwd" if is_backward else "fwd", roof)
        more = more_keys[is_backward]
        length = shapes.length()
        shorter = (1 + more / length) / np.minimum(1 + more / _LONG, 1 + more / length)
        shorter *= shapes.flops(direction) / long.flops(direction)
        us = long_us * shorter * shapes.slowdown / slower[int(is_backward)]
        moved = shapes.moved_bytes() * (2.0 if is_backward else 1.0)
        memory = _START_US + moved / (roof.memory_bandwidth * _ACHIEVED_BANDWIDTH) * 1e6
        rate = _OVER_FLASH_2.get(kernel, (1.0, 1.0))
        return np.asarray(np.maximum(us / rate[is_backward], memory / (_slower(shapes, kernel)[0] * rate[0])))

    def _inference_us(self, shapes: AttentionShapes, roof: AttentionRoof) -> Floats:
        heads = (shapes.batch * shapes.heads).astype(np.float64)
        quotient = self._inference.at(shapes.mean_width(), [shapes.like_tokens(), heads])
        return np.asarray(np.exp(quotient) * _reference_us(shapes, roof) * shapes.slowed_by_window())

    def _cudnn_us(self, shapes: AttentionShapes, direction: str, roof: AttentionRoof) -> Floats:
        assert self._cudnn is not None
        flops = shapes.flops("forward" if direction == "fwd" else "backward")
        width = shapes.mean_width()
        tokens = shapes.like_tokens()
        rate = np.zeros(len(flops))
        for causal in (False, True):
            chosen = (shapes.causal | ((shapes.window > 0) & ~shapes.in_blocks)) == causal
            grids = self._cudnn[direction, causal]
            fraction = grids.at(width[chosen], [tokens[chosen]])
            rate[chosen] = np.exp(fraction) * roof.peak_flops / self._narrower(grids, width[chosen], tokens[chosen])
        return np.asarray(flops * shapes.slowed_by_window() / rate * 1e6 * self._few_heads(shapes))

    def _narrower(self, grids: _Grids, width: Floats, tokens: Floats) -> Floats:
        """Slowdown of a FLOP with these heads against the nearest width that cuDNN was measured with."""
        measured = grids.nearest(width)
        heads = np.full_like(tokens, _MANY_HEADS)
        slower = self._inference.at(width, [tokens, heads]) - self._inference.at(measured, [tokens, heads])
        return np.asarray(np.where(np.abs(np.log(width / measured)) > _SAME_WIDTH, np.exp(slower), 1.0))

    def _few_heads(self, shapes: AttentionShapes) -> Floats:
        heads = (shapes.batch * shapes.heads).astype(float)
        tokens = shapes.like_tokens()
        few = np.minimum(heads, _MANY_HEADS)
        width = shapes.mean_width()
        slower = self._inference.at(width, [tokens, few])
        return np.exp(slower - self._inference.at(width, [tokens, np.full_like(few, _MANY_HEADS)]))


def _reference_us(shapes: AttentionShapes, roof: AttentionRoof) -> Floats:
    memory = shapes.moved_bytes() / (roof.memory_bandwidth * _ACHIEVED_BANDWIDTH)
    return np.asarray(_START_US + np.maximum(shapes.flops() / roof.peak_flops, memory) * 1e6)


class _Grids:
    """Grids of the column ``quotient`` over one or two logarithmic axes; the nearest value of ``by`` answers."""

    def __init__(self, table: pd.DataFrame, by: str, axes: list[str]) -> None:
        self._keys = np.log(np.sort(table[by].unique()).astype(np.float64))
        self._grids: list[tuple[list[Floats], Floats]] = []
        for _, rows in table.groupby(by, sort=True):
            values = rows.groupby(axes)["quotient"].median()
            grid = values.unstack() if len(axes) == 2 else values
            levels = [grid.index, grid.columns] if isinstance(grid, pd.DataFrame) else [grid.index]
            self._grids.append(([np.log(level.to_numpy(np.float64)) for level in levels], fill_gaps(grid.to_numpy())))

    def nearest(self, keys: Floats) -> Floats:
        """The nearest key that has a grid."""
        return np.asarray(np.exp(self._keys[self._nearest_key(keys)]))

    def _nearest_key(self, keys: Floats) -> Integers:
        return np.asarray(np.abs(self._keys[:, None] - np.log(keys)[None, :]).argmin(axis=0))

    def at(self, keys: Floats, points: list[Floats]) -> Floats:
        """The interpolated values at these points, each from the grid of the nearest key."""
        nearest = self._nearest_key(keys)
        values = np.zeros(len(keys))
        for position, (axes, grid) in enumerate(self._grids):
            chosen = nearest == position
            values[chosen] = interpolate(axes, grid, [np.log(point[chosen]) for point in points])
        return values


def _cudnn_grids(training: pd.DataFrame, peak_flops: float) -> dict[tuple[str, bool], _Grids] | None:
    """Logarithm of cuDNN's fraction of the bf16 peak, by direction and mask, over tokens for each width."""
    if training.empty:
        return None
    rows = training[(training["data_type"] == "bfloat16") & training["sliding_window_size"].isna()]
    shape = ["config_name", "attn_mask", "batch_size", "q_seqlen", "pass"]
    rows = rows.sort_values("deterministic_bwd").drop_duplicates(shape)  # deterministic only where there is no other
    table = pd.DataFrame(
        {
            "direction": rows["pass"],
            "causal": rows["attn_mask"] == "top_left",
            "width": (rows["head_dim_qk"] + rows["head_dim_vo"]) // 2,
            "tokens": rows["q_seqlen"],
            "quotient": np.log(rows["tflops"] * 1e12 / peak_flops),
        }
    )
    grids = {}
    for direction in ("fwd", "bwd"):
        for causal in (False, True):
            own = table[(table["direction"] == direction) & (table["causal"] == causal)]
            grids[direction, causal] = _Grids(own if len(own) else table, "width", ["tokens"])
    return grids


def _slower(shapes: AttentionShapes, kernel: AttentionKernel) -> Floats:
    """The rates of a forward and of a backward over cuDNN's: two rows."""
    if kernel == "cudnn":
        return np.ones((2, len(shapes.keys)))
    tokens = np.log(shapes.like_tokens())
    return np.array([np.interp(tokens, _FLASH_2_TOKENS, rates) for rates in (_FLASH_2_FORWARD, _FLASH_2_BACKWARD)])
