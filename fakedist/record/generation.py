"""Distinguishes a language model's generation from its other forwards without gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

#: Keyword arguments in which a model takes the cache of keys, values or states that its forward adds to.
_CACHES = (
    *("past_key_values", "past_key_value", "layer_past", "cache_params", "kv_cache", "kv_caches", "cache"),
    *("inference_params", "inference_context"),
)


class _TokenForward(NamedTuple):
    sequences: int
    tokens: int
    generates: bool
    grows: bool


class Generation:
    """Knows the forwards of root modules that generate tokens.

    A forward without gradients generates

    - if it gets a cache of keys and values, or of states, as transformers' ``generate()`` does from the prompt on;
    - if it goes on where the module's forward before ended: with one token for each sequence after a longer input (a
      cache inside the model), or with one token more than before (no cache), or after that with as many (the context
      is full). The first forward, of the prompt, is an ordinary one: its successors are not known yet.

    Tokens are the first tensor of integers among the arguments that has two dimensions.
    """

    def __init__(self) -> None:
        self._last: dict[int, _TokenForward] = {}

    def generates(self, module: nn.Module, args: Iterable[object], kwargs: dict[str, object]) -> bool:
        """Take note of a root module that is about to run forward, and return whether it generates."""
        if torch.is_grad_enabled():
            self._last.clear()  # what follows is another loop
            return False
        shape = _tokens((*args, *kwargs.values()))
        if any(kwargs.get(name) is not None for name in _CACHES):
            generates, grows = True, False
        else:
            generates, grows = self._goes_on(self._last.get(id(module)), shape)
        if shape is not None:
            self._last[id(module)] = _TokenForward(*shape, generates, grows)
        return generates

    @staticmethod
    def _goes_on(last: _TokenForward | None, shape: tuple[int, int] | None) -> tuple[bool, bool]:
        """Return whether a forward goes on where the last one ended, and whether without a cache."""
        if last is None or shape is None or last.sequences != shape[0]:
            return False, False
        tokens = shape[1]
        if tokens == last.tokens + 1 or (tokens == last.tokens and last.grows):
            return True, True
        return tokens == 1 and (last.tokens > 1 or last.generates), False


def _tokens(arguments: Iterable[object]) -> tuple[int, int] | None:
    """Number of sequences, and of tokens in each."""
    for value in arguments:
        if not isinstance(value, torch.Tensor) or value.is_nested or value.dim() != 2:
            continue
        if not value.is_floating_point():
            return int(value.shape[0]), int(value.shape[1])
    return None
