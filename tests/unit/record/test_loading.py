"""The DataLoaders that feed the steps, and their locations."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from fakedist.record.loading import Loading


def loader(num_batches: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.zeros(2 * num_batches, 3)), batch_size=2)


def test_the_loader_of_the_steps_is_named_with_its_line_and_the_one_of_the_validation_is_not() -> None:
    loading = Loading()
    with loading.watching():
        for _ in loader(4):
            loading.used(in_training=True)  # a forward,
            loading.used(in_training=True)  # and a backward
        for _ in loader(3):
            loading.used(in_training=False)
            loading.used(in_training=True)
    (note,) = loading.notes()
    assert note.code == "data_loader"
    assert "test_loading.py:18 (" in note.text
    assert "TensorDataset, no worker processes" in note.text
    assert "measured on this machine" in note.text
    assert "(median of 3)" in note.text  # the first batch starts the workers


def test_batches_taken_before_a_step_are_all_its_own() -> None:
    loading = Loading()
    with loading.watching():
        batches = list(loader(3))
        loading.used(in_training=True)
    assert len(batches) == 3
    assert len(loading.notes()) == 1
    next(iter(loader(1)))
    loading.used(in_training=True)
    assert len(loading.notes()) == 1  # nothing is watched any more
