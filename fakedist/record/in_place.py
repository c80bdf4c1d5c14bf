"""What torch does otherwise while a dispatch mode is on, done as without us.

``at::isTensorSubclassLike`` takes every tensor for a subclass then, and some code avoids in-place operations for those:
one more tensor, often at the worst moment. Two places matter to the memory of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fakedist.record.compiled import is_tracing

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def hook_producers(outputs: Iterable[Any], done: Callable[[], None]) -> list[RemovableHandle]:
    """Call ``done()`` after each node of a graph whose result is added to another's.

    Where a tensor was used twice, the engine adds the two gradients in place if nobody else holds the first
    (``can_accumulate_inplace``, torch/csrc/autograd/input_buffer.cpp). The engine restores its thread's modes for each
    node, so a hook that runs when a node is done may take ours off for what follows, the adding up.

    Args:
        outputs: Tensors or gradient edges that backward starts from.
        done: Called when such a node is done, before its results are added up.

    Returns:
        Handles that take the hooks off again.
    """
    producers: dict[tuple[Any, int], list[Any]] = {}
    arriving: Counter[tuple[Any, int]] = Counter()
    waiting = [root for output in outputs if (root := _root(output)) is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for edge in node.next_functions:
            target = edge[0]
            if target is None:
                continue
            arriving[edge] += 1
            producers.setdefault(edge, []).append(node)
            if target not in seen:
                seen.add(target)
                waiting.append(target)
    hooked = {node for edge, count in arriving.items() if count > 1 for node in producers[edge]}
    return [node.register_hook(lambda *_: done()) for node in hooked]


def _root(output: Any) -> Any:
    return output.grad_fn if isinstance(output, torch.Tensor) else getattr(output, "node", None)


@contextmanager
def bias_added_in_place() -> Iterator[None]:
    """Let ``linear`` add its bias in place where the input is not flattened (aten/src/ATen/native/Linear.cpp)."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("linear", _linear, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()


def _linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    flattened = given.dim() == 2 or (given.dim() == 3 and given.is_contiguous())
    plain = type(given) in _PLAIN and type(weight) in _PLAIN and type(bias) in _PLAIN
    if bias is None or flattened or not plain or given.dim() < 2 or weight.dim() != 2 or is_tracing():
        return torch.ops.aten.linear.default.decompose(given, weight, bias)
    return torch.matmul(given, weight.t()).add_(bias)
