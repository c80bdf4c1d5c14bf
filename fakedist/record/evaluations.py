"""Finds evaluations between training steps, without the script's help."""

from __future__ import annotations

import torch
from torch import nn


class Evaluations:
    """Distinguishes evaluation from training by the forwards of root modules.

    It is an evaluation if, after an optimizer has stepped, a trainable model runs without grad, or in ``eval()``
    although it trained in ``train()``. A model that ran without grad in ``train()`` before the first optimizer stepped
    does so in training too (a GAN's generator for its critic, a rollout).

    Attributes:
        num_ended: Evaluations that ended because training went on.
        running: Whether an evaluation is running.
    """

    def __init__(self) -> None:
        self.num_ended = 0
        self.running = False
        self._in_training: set[int] = set()  # ran without grad as part of training
        self._trained: set[int] = set()  # ran with grad in train()

    @property
    def seen(self) -> bool:
        """Whether any evaluation has run or is running."""
        return self.running or self.num_ended > 0

    def root_forward(self, module: nn.Module, has_stepped: bool) -> None:
        """Take note of a root module that is about to run forward.

        Args:
            module: The module.
            has_stepped: Whether an optimizer has stepped.
        """
        grad = torch.is_grad_enabled()
        if not has_stepped:
            if module.training:
                (self._trained if grad else self._in_training).add(id(module))
        elif self._is_evaluation(module, grad):
            self.running = True
        elif grad:
            self.training()

    def training(self) -> None:
        """End a running evaluation: a forward or a backward of training runs."""
        if self.running:
            self.running = False
            self.num_ended += 1

    def _is_evaluation(self, module: nn.Module, grad: bool) -> bool:
        if grad:
            return not module.training and id(module) in self._trained
        known = module.training and id(module) in self._in_training
        return not known and any(parameter.requires_grad for parameter in nn.Module.parameters(module))
