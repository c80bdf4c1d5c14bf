"""Times of attention, forward and backward, by the library that computes it.

What was measured, and how the three kinds of kernels are estimated from it:

- *cuDNN*: forward and backward on H200 and GB200, with and without a causal mask, at many heads. The achieved fraction
  of the peak is interpolated over tokens for the nearest head width. GPUs of the same compute capability share it.
- *FlashAttention-2*, which PyTorch builds in. On Hopper and newer it is slower than cuDNN by the quotient that the
  FlashAttention-3 paper measured on an H100. On Ampere and Ada it is what the inference table holds.
- *inference*: causal forwards of FlashAttention-3, TensorRT-LLM and others, by tokens and heads of all sequences.
  It also says how much slower a few heads are than many, for all kinds.

Backward where no backward was measured (Ampere and Ada): FLOPs at the fraction of the forward's rate that the
FlashAttention-2 paper gives for A100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.time.measurements import Floats, Integers
from fakedist.time.products import fill_gaps, interpolate

AttentionKernel = Literal["cudnn", "flash2", "inference"]

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
#: FLOPs of backward over forward (five products against two), and the rate of FlashAttention-2's backward over its
#: forward on A100: 63 % and 73 % of the peak (arXiv:2307.08691).
_BACKWARD_FLOPS = 2.5
_BACKWARD_RATE = 0.63 / 0.73
#: cuDNN was measured with at least this many heads in all, which fill the GPU.
_MANY_HEADS = 64


@dataclass(frozen=True)
class AttentionShapes:
    """Self-attentions to estimate; arrays of one length.

    Attributes:
        batch: Sequences.
        heads: Query heads of a sequence.
        kv_heads: Key and value heads.
        tokens: Tokens of a sequence.
        width: Width of a head, the mean of the queries' and the values'.
        causal: Whether each query meets only the keys before it.
    """

    batch: Integers
    heads: Integers
    kv_heads: Integers
    tokens: Integers
    width: Integers
    causal: npt.NDArray[np.bool_]

    def flops(self) -> Floats:
        """FLOPs of the forward."""
        met = np.where(self.causal, (self.tokens + 1) / 2, self.tokens)
        return np.asarray(4.0 * self.batch * self.heads * self.tokens * met * self.width)

    def moved_bytes(self) -> Floats:
        """The fewest bytes that the forward reads and writes."""
        heads = 2.0 * (self.heads + self.kv_heads)
        return np.asarray(heads * self.batch * self.tokens * self.width * _ELEMENT_BYTES)


class AttentionTimes:
    """Estimates attention on one GPU.

    Args:
        inference: Measured forwards (``Measured.attention``) of this GPU.
        training: cuDNN's forwards and backwards (``Measured.training_attention``) of this GPU or one of its compute
            capability; empty if there are none.
        peak_flops: The bf16 peak of the GPU of ``inference``, FLOP/s.
        memory_bandwidth: Its memory bandwidth, bytes per second.
        training_peak_flops: The bf16 peak of the GPU of ``training``.
    """

    def __init__(
        self,
        inference: pd.DataFrame,
        training: pd.DataFrame,
        peak_flops: float,
        memory_bandwidth: float,
        *,
        training_peak_flops: float = 1.0,
    ) -> None:
        self._peak, self._bandwidth = peak_flops, memory_bandwidth
        columns = (inference[name].to_numpy() for name in ("batch", "heads", "kv_heads", "tokens", "width"))
        batch, heads, kv_heads, tokens, width = columns
        own = AttentionShapes(batch, heads, kv_heads, tokens, width, causal=np.ones(len(inference), bool))
        quotient = np.log(inference["time_us"].to_numpy() / self._reference_us(own))
        table = inference.assign(quotient=quotient, all_heads=own.batch * own.heads)
        self._inference = _Grids(table, "width", ["tokens", "all_heads"])
        self._cudnn = _cudnn_grids(training, training_peak_flops)

    def forward_us(self, shapes: AttentionShapes, kernel: AttentionKernel) -> Floats:
        """Microseconds of each forward."""
        if self._cudnn is None or kernel == "inference":
            return self._inference_us(shapes)
        return self._cudnn_us(shapes, "fwd", shapes.flops()) / _slower(shapes, kernel, _FLASH_2_FORWARD)

    def backward_us(self, shapes: AttentionShapes, kernel: AttentionKernel) -> Floats:
        """Microseconds of each backward."""
        if self._cudnn is None:
            return self._inference_us(shapes) * _BACKWARD_FLOPS / _BACKWARD_RATE
        flops = _BACKWARD_FLOPS * shapes.flops()
        return self._cudnn_us(shapes, "bwd", flops) / _slower(shapes, kernel, _FLASH_2_BACKWARD)

    def _inference_us(self, shapes: AttentionShapes) -> Floats:
        heads = (shapes.batch * shapes.heads).astype(np.float64)
        quotient = self._inference.at(shapes.width, [shapes.tokens.astype(np.float64), heads])
        return np.asarray(np.exp(quotient) * self._reference_us(shapes))

    def _cudnn_us(self, shapes: AttentionShapes, direction: str, flops: Floats) -> Floats:
        assert self._cudnn is not None
        rate = np.zeros(len(flops))
        for causal in (False, True):
            chosen = shapes.causal == causal
            fraction = self._cudnn[direction, causal].at(shapes.width[chosen], [shapes.tokens[chosen].astype(float)])
            rate[chosen] = np.exp(fraction) * self._peak
        return np.asarray(flops / rate * 1e6 * self._few_heads(shapes))

    def _few_heads(self, shapes: AttentionShapes) -> Floats:
        """How much slower a FLOP is than with many heads."""
        heads, tokens = (shapes.batch * shapes.heads).astype(float), shapes.tokens.astype(float)
        few = np.minimum(heads, _MANY_HEADS)
        slower = self._inference.at(shapes.width, [tokens, few])
        return np.exp(slower - self._inference.at(shapes.width, [tokens, np.full_like(few, _MANY_HEADS)]))

    def _reference_us(self, shapes: AttentionShapes) -> Floats:
        compute = shapes.flops() / self._peak
        memory = shapes.moved_bytes() / (self._bandwidth * _ACHIEVED_BANDWIDTH)
        return np.asarray(_START_US + np.maximum(compute, memory) * 1e6)


class _Grids:
    """Values over some axes (logarithmic), one grid for each value of ``by``; the nearest one answers.

    Args:
        table: Columns ``by``, the axes, and ``quotient``: the values, whose median counts.
        by: The column that chooses a grid.
        axes: One or two columns.
    """

    def __init__(self, table: pd.DataFrame, by: str, axes: list[str]) -> None:
        self._keys = np.log(np.sort(table[by].unique()).astype(np.float64))
        self._grids: list[tuple[list[Floats], Floats]] = []
        for _, rows in table.groupby(by, sort=True):
            values = rows.groupby(axes)["quotient"].median()
            grid = values.unstack() if len(axes) == 2 else values
            levels = [grid.index, grid.columns] if isinstance(grid, pd.DataFrame) else [grid.index]
            self._grids.append(([np.log(level.to_numpy(np.float64)) for level in levels], fill_gaps(grid.to_numpy())))

    def at(self, keys: Integers, points: list[Floats]) -> Floats:
        """The interpolated values at these points, each from the grid of the nearest key."""
        nearest = np.abs(self._keys[:, None] - np.log(keys.astype(np.float64))[None, :]).argmin(axis=0)
        found = np.zeros(len(keys))
        for place, (axes, grid) in enumerate(self._grids):
            chosen = nearest == place
            found[chosen] = interpolate(axes, grid, [np.log(point[chosen]) for point in points])
        return found


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
    found = {}
    for direction in ("fwd", "bwd"):
        for causal in (False, True):
            own = table[(table["direction"] == direction) & (table["causal"] == causal)]
            found[direction, causal] = _Grids(own if len(own) else table, "width", ["tokens"])
    return found


def _slower(shapes: AttentionShapes, kernel: AttentionKernel, rates: Floats) -> Floats:
    if kernel != "flash2":
        return np.ones(len(shapes.tokens))
    return np.asarray(np.interp(np.log(shapes.tokens.astype(float)), _FLASH_2_TOKENS, rates))
