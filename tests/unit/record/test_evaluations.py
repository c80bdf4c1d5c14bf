"""Evaluations are told from training."""

from __future__ import annotations

import torch
from torch import nn

from fakedist.record.steps import Evaluations


def model(*, frozen: bool = False) -> nn.Module:
    return nn.Linear(1, 1).requires_grad_(not frozen)


def forward(found: Evaluations, module: nn.Module, *, grad: bool = True, stepped: bool = True) -> None:
    with torch.set_grad_enabled(grad):
        found.root_forward(module, stepped)


def test_an_evaluation_ends_where_training_goes_on() -> None:
    found, trained = Evaluations(), model()
    forward(found, trained, stepped=False)
    forward(found, trained)
    assert not found.seen
    forward(found, trained, grad=False)
    forward(found, trained, grad=False)
    assert (found.running, found.num_ended) == (True, 0)
    forward(found, trained)
    assert (found.running, found.num_ended) == (False, 1)


def test_a_frozen_model_in_each_step_is_no_evaluation() -> None:
    found, trained, encoder = Evaluations(), model(), model(frozen=True).eval()
    for stepped in (False, True):
        forward(found, encoder, grad=False, stepped=stepped)
        forward(found, trained, stepped=stepped)
    assert not found.seen


def test_a_generator_that_runs_without_grad_for_its_critic_is_no_evaluation() -> None:
    found, generator, critic = Evaluations(), model(), model()
    for stepped in (False, True):
        forward(found, generator, grad=False, stepped=stepped)
        forward(found, critic, stepped=stepped)
        forward(found, generator, stepped=stepped)
    assert not found.seen
    forward(found, generator.eval(), grad=False)
    assert found.seen


def test_a_model_in_eval_that_trained_in_train_is_evaluated_with_grad_too() -> None:
    found, trained = Evaluations(), model()
    forward(found, trained, stepped=False)
    forward(found, trained.eval())
    assert found.seen
