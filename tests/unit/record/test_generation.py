"""Forwards without gradients that generate tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fakedist.record.generation import Generation

MODEL, OTHER = nn.Linear(1, 1), nn.Linear(1, 1)


def tokens(number: int, sequences: int = 2) -> torch.Tensor:
    return torch.zeros(sequences, number, dtype=torch.long)


@pytest.mark.parametrize(
    ("lengths", "generate"),
    [
        ([7, 1, 1, 1], "-+++"),  # a cache inside the model
        ([7, 8, 9, 10], "-+++"),  # no cache
        ([7, 8, 8, 8], "-+++"),  # no cache, and the context is full
        ([7, 7, 7, 7], "----"),  # an evaluation
        ([7, 9, 12, 5], "----"),  # an evaluation of batches of several lengths
        ([1, 1, 1, 1], "----"),  # nothing tells
        ([7, 1, 7, 1, 1], "-+-++"),  # two prompts
    ],
)
def test_forwards_that_go_on_where_the_one_before_ended_generate(lengths: list[int], generate: str) -> None:
    generation = Generation()
    with torch.no_grad():
        generated = [generation.generates(MODEL, (tokens(length),), {}) for length in lengths]
    assert "".join("-+"[is_on] for is_on in generated) == generate


def test_nested_tokens_are_those_of_an_evaluation() -> None:
    generation, rows = Generation(), [torch.zeros(each, dtype=torch.long) for each in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with torch.no_grad():
        assert not any(generation.generates(MODEL, (nested,), {}) for _ in range(2))


def test_a_forward_that_is_given_a_cache_generates_from_the_prompt_on() -> None:
    generation = Generation()
    with torch.inference_mode():
        given = {"input_ids": tokens(7), "past_key_values": object()}
        assert generation.generates(MODEL, (), given)
        assert not generation.generates(MODEL, (), given | {"past_key_values": None})
    assert not generation.generates(MODEL, (), given)  # with gradients: a prefix that is trained


def test_another_model_other_sequences_and_a_forward_of_training_begin_anew() -> None:
    generation = Generation()
    with torch.no_grad():
        generation.generates(MODEL, (tokens(7),), {})
        assert not generation.generates(OTHER, (tokens(8),), {})
        assert not generation.generates(MODEL, (tokens(8, sequences=3),), {})
        assert generation.generates(OTHER, (), {"pixels": torch.zeros(2, 9), "input_ids": tokens(9)})
    generation.generates(MODEL, (tokens(7),), {})
    with torch.no_grad():
        assert not generation.generates(OTHER, (tokens(10),), {})
