import pytest
import torch
from torch import nn

from fakedist.record.machine_score import _as_in_training, _Linear


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


def test_hooks_of_the_script_for_all_modules_do_not_run_in_the_score() -> None:
    ran = list[str]()
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda *_: ran.append("before")),
        nn.modules.module.register_module_forward_hook(lambda *_: ran.append("after")),
    ]
    linear, x = _Linear("cpu"), torch.ones(8, 64)
    try:
        with _as_in_training():
            linear(x)
        assert ran == []
        linear(x)
    finally:
        for handle in handles:
            handle.remove()
    assert ran == ["before", "after"]
