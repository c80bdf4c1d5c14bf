"""The floating-point operations of an operation in a trace of torch.profiler with ``record_shapes=True``.

They are counted as those of a recorded step are (``gpu/demand``): products, convolutions and attention alone, each
without what a causal mask spares. What the trace does not say, such as a convolution's strides, is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_scaled_mm": 0}
#: Positions of the padding, the stride, the dilation and what says that it is transposed (-1: its name says it is not).
_CONVOLUTIONS = {
    "aten::convolution": (4, 3, 5, 6),
    "aten::_convolution": (4, 3, 5, 6),
    "aten::cudnn_convolution": (2, 3, 4, -1),
    "aten::cudnn_convolution_relu": (4, 3, 5, -1),
}
#: Position of the queries, whether heads come before positions, and the position of what says that it is causal.
_ATTENTION = {
    "aten::_flash_attention_forward": (0, False, 8),
    "aten::_flash_attention_backward": (1, False, 11),
    "aten::_efficient_attention_forward": (0, False, 9),
    "aten::_efficient_attention_backward": (1, False, 14),
    "aten::_scaled_dot_product_cudnn_attention": (0, True, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, True, 14),
}
#: The most that is counted. Larger sizes are not those of a tensor.
_MOST = 1 << 60


def operation_flops(name: str, more: Mapping[str, object]) -> int:
    """The FLOPs of an operation, by the sizes and values in its event's ``args``; 0 if they are not known."""
    dims, values = more.get("Input Dims", more.get("Input dims")), more.get("Concrete Inputs")
    if not isinstance(dims, list) or not name.startswith("aten::"):
        return 0
    try:
        flops = _flops(name, dims, values if isinstance(values, list) else [])
    except (IndexError, TypeError, ValueError):
        return 0
    return int(flops) if 0 < flops < _MOST else 0


def _flops(name: str, dims: list[object], values: list[object]) -> float:
    if name in _PRODUCTS:
        left, right = (_sizes(dims[_PRODUCTS[name] + side]) for side in (0, 1))
        return 2 * math.prod(left) * right[-1]
    if name in _ATTENTION:
        return _attention(name, dims, values)
    if name == "aten::convolution_backward":
        return _convolution_backward(dims, values)
    if name in _CONVOLUTIONS:
        padding, stride, dilation, transposed = _CONVOLUTIONS[name]
        data, weight = _sizes(dims[0]), _sizes(dims[1])
        if transposed >= 0 and _value(values[transposed]):
            return 2 * data[0] * math.prod(data[2:]) * math.prod(weight)
        pads, strides, spreads = (_list(values[at], len(data) - 2) for at in (padding, stride, dilation))
        positions = [
            (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
            for size, kernel, pad, step, spread in zip(data[2:], weight[2:], pads, strides, spreads, strict=True)
        ]
        return 2 * data[0] * math.prod(positions) * math.prod(weight)
    return 0


def _convolution_backward(dims: list[object], values: list[object]) -> float:
    """The gradients of the input and of the weights take as much as the forward each."""
    gradient, data, weight = (_sizes(dims[at]) for at in range(3))
    met = data if _value(values[7]) else gradient
    wanted = _list(values[10], 3)[:2]
    return 2 * met[0] * math.prod(met[2:]) * math.prod(weight) * sum(map(bool, wanted))


def _attention(name: str, dims: list[object], values: list[object]) -> float:
    """Two products forward, five backward; one of the five computes the scores again."""
    at, is_heads_first, causal = _ATTENTION[name]
    query, key, value = (_sizes(dims[at + side]) for side in range(3))
    batch, positions, heads = (query[0], query[-2], query[-3]) if is_heads_first else query[:3]
    keys = key[-2] if is_heads_first else key[1]
    met = float(keys)
    if _value(values[causal]):
        if positions != keys:
            return 0
        met = (keys + 1) / 2
    widths = query[-1] + value[-1] if at == 0 else 3 * query[-1] + 2 * value[-1]
    return 2 * batch * heads * positions * met * widths


def _sizes(value: object) -> list[int]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < _MOST for size in value):
        raise TypeError
    return value


def _value(value: object) -> int:
    """A flag or a number, which torch writes as text."""
    return {"False": 0, "True": 1}[value] if value in ("False", "True") else int(str(value))


def _list(value: object, length: int) -> list[int]:
    """A list of numbers or flags, which torch writes as text. One number stands for all."""
    values = [_value(part.strip()) for part in str(value).strip("[]").split(",")]
    return values * length if len(values) == 1 else values
