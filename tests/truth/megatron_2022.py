"""Runs examples/megatron_gpt.py with the transfers between pipeline stages that Megatron-LM had in 2022.

Without sequence parallelism, all tensor parallel ranks of a stage have the same activations. Each sent its own part of
them, and the ranks of the next stage gathered the parts; megatron-core 0.16.1 sends all of them from each rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import megatron_gpt
import torch
from megatron.core.parallel_state import get_tensor_model_parallel_world_size
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from megatron.core.utils import make_viewless_tensor

Communicate = Callable[..., tuple[torch.Tensor | None, torch.Tensor | None, Any]]


def in_parts(communicate: Communicate) -> Communicate:
    """The transfers of ``P2PCommunicator``, each of this rank's part; what is received is gathered."""

    @functools.wraps(communicate)
    def of_parts(self: P2PCommunicator, **calls: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
        shape = calls["tensor_shape"]
        if self.config.sequence_parallel:
            return communicate(self, **calls)
        for name in ("tensor_send_next", "tensor_send_prev"):
            if calls[name] is not None:
                calls[name] = split_tensor_into_1d_equal_chunks(calls[name])
        if shape is not None:
            calls["tensor_shape"] = (math.prod(shape) // get_tensor_model_parallel_world_size(),)
        *received, requests = communicate(self, **calls)
        before, after = (part if part is None else whole(part, shape) for part in received)
        return before, after, requests

    return of_parts


def whole(part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The activations, or their gradients, of which all tensor parallel ranks have a part."""
    gathered: torch.Tensor = make_viewless_tensor(gather_split_1d_tensor(part).view(shape), True, False)
    return gathered


if __name__ == "__main__":
    P2PCommunicator._communicate = in_parts(P2PCommunicator._communicate)
    megatron_gpt.main()
