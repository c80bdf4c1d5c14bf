from __future__ import annotations

import torch
from torch import nn

from fakedist.record.steps import Evaluations


def model(*, frozen: bool = False) -> nn.Module:
    return nn.Linear(1, 1).requires_grad_(not frozen)


def forward(evaluations: Evaluations, module: nn.Module, *, grad: bool = True, stepped: bool = True) -> None:
    with torch.set_grad_enabled(grad):
        evaluations.root_forward(module, stepped)


def test_an_evaluation_ends_where_training_goes_on() -> None:
    evaluations, trained = Evaluations(), model()
    forward(evaluations, trained, stepped=False)
    forward(evaluations, trained)
    assert not evaluations.seen
    forward(evaluations, trained, grad=False)
    forward(evaluations, trained, grad=False)
    assert (evaluations.running, evaluations.num_ended) == (True, 0)
    forward(evaluations, trained)
    assert (evaluations.running, evaluations.num_ended) == (False, 1)


def test_a_frozen_model_in_each_step_is_no_evaluation() -> None:
    evaluations, trained, encoder = Evaluations(), model(), model(frozen=True).eval()
    for stepped in (False, True):
        forward(evaluations, encoder, grad=False, stepped=stepped)
        forward(evaluations, trained, stepped=stepped)
    assert not evaluations.seen


def test_a_generator_that_runs_without_grad_for_its_critic_is_no_evaluation() -> None:
    evaluations, generator, critic = Evaluations(), model(), model()
    for stepped in (False, True):
        forward(evaluations, generator, grad=False, stepped=stepped)
        forward(evaluations, critic, stepped=stepped)
        forward(evaluations, generator, stepped=stepped)
    assert not evaluations.seen
    forward(evaluations, generator.eval(), grad=False)
    assert evaluations.seen


def test_a_model_in_eval_that_trained_in_train_is_evaluated_with_grad_too() -> None:
    evaluations, trained = Evaluations(), model()
    forward(evaluations, trained, stepped=False)
    forward(evaluations, trained.eval())
    assert evaluations.seen
