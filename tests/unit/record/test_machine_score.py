import pytest
import torch
from torch import nn

from fakedist.record.machine_score import _Linear


def test_a_script_that_replaces_torchs_linear_does_not_change_the_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(*_: object) -> torch.Tensor:
        raise AssertionError("the script's function runs")

    monkeypatch.setattr(nn.functional, "linear", replaced)
    monkeypatch.setattr(nn.Linear, "forward", replaced)
    monkeypatch.setattr(nn.Module, "__call__", replaced)
    x = torch.ones(8, 64)
    linear = _Linear("cpu")
    nn.init.ones_(linear.weight)
    assert linear(x).unique().tolist() == [64.0]
