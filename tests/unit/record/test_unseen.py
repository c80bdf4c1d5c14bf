"""Our global hooks are gone while Dynamo traces, and back where the script runs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo import trace_rules
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from fakedist.rank.frameworks.dynamo import nothing_of_ours
from fakedist.record.hooks import optimizer_hooks
from fakedist.record.unseen import Unseen, put_back, take


def table(**hooks: object) -> tuple[OrderedDict[int, object], dict[str, RemovableHandle]]:
    """A table of hooks, and the handle of each by name."""
    table: OrderedDict[int, object] = OrderedDict()
    handles = {name: RemovableHandle(table) for name in hooks}
    table.update({handles[name].id: hook for name, hook in hooks.items()})
    return table, handles


def test_hooks_are_gone_while_hidden_and_come_back_before_those_of_the_script() -> None:
    hooks, handles = table(first="first", script="script", second="second")
    unseen = Unseen()
    remove = unseen.add(handles["first"])
    unseen.add(handles["second"])
    with unseen.hidden():
        assert list(hooks.values()) == ["script"]
        with unseen.hidden():
            assert list(hooks.values()) == ["script"]
        assert list(hooks.values()) == ["script"]
    assert list(hooks.values()) == ["first", "second", "script"]
    remove()
    with unseen.hidden():
        pass
    assert list(hooks.values()) == ["second", "script"]


def test_a_hook_that_the_script_removed_is_not_put_back_and_a_replaced_method_is_hidden_too() -> None:
    hooks, handles = table(mine="mine")
    handles["mine"].remove()
    put_back(take([handles["mine"]]))
    assert not hooks
    unseen, original = Unseen(), vars(nn.Linear)["forward"]
    for _ in range(2):
        with unseen.replaced(nn.Linear, "forward", lambda *_: None):
            assert vars(nn.Linear)["forward"] is not original
            with unseen.hidden():
                assert vars(nn.Linear)["forward"] is original
            assert vars(nn.Linear)["forward"] is not original
        with unseen.hidden():
            assert vars(nn.Linear)["forward"] is original
        assert vars(nn.Linear)["forward"] is original


def test_flags_of_a_hook_are_hidden_with_it() -> None:
    unseen = Unseen()
    handle = nn_module.register_module_forward_hook(lambda *_: None, always_call=True)
    remove = unseen.add(handle)
    assert handle.id in nn_module._global_forward_hooks_always_called
    with unseen.hidden():
        assert not nn_module._global_forward_hooks
        assert not nn_module._global_forward_hooks_always_called
    assert handle.id in nn_module._global_forward_hooks_always_called
    remove()
    assert not nn_module._global_forward_hooks


class _Descent(torch.optim.Optimizer):
    """Traced in one graph."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-1.0)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    nothing_of_ours(trace_rules)  # in a run, Dynamo compiles no frame of ours
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _breaks(
    kind: Callable[[list[nn.Parameter]], torch.optim.Optimizer], within: str, after: Callable[[int], None]
) -> list[str]:
    """Run three compiled steps. Returns the reasons for graph breaks."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = kind([parameter])
    step = torch.compile(optimizer.step if within == "method" else lambda: optimizer.step(), backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for times in (1, 2, 3):
        step()
        after(times)
    return sorted(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, _Descent])
@pytest.mark.parametrize("within", ["method", "function"])
def test_a_compiled_step_is_reported_once_each_time_and_breaks_no_more_graphs(kind: type, within: str) -> None:
    bare = _breaks(kind, within, lambda times: None)
    reports: list[str] = []

    def reported(times: int) -> None:
        assert reports == ["begins", "ended"] * times

    with optimizer_hooks(lambda _: reports.append("begins"), lambda _: reports.append("ended"), Unseen()):
        assert _breaks(kind, within, reported) == bare


@pytest.mark.parametrize("kind", [torch.optim.SGD, _Descent])
def test_a_step_that_was_compiled_runs_on_without_us(kind: type) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    reported: list[str] = []
    optimizer = kind([parameter])
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    with optimizer_hooks(lambda _: reported.append("begins"), lambda _: reported.append("ended"), Unseen()):
        step()
    step()
    assert reported == ["begins", "ended"]


def test_dynamo_takes_the_short_way_through_modules() -> None:
    calls: list[str] = []
    unseen = Unseen()
    remove = unseen.add(nn_module.register_module_forward_hook(lambda *_: calls.append("hook")))
    model = nn.Sequential(nn.Linear(2, 2))
    with unseen.from_dynamo(lambda _: None, lambda _: None):
        exported = torch.export.export(model, (torch.ones(1, 2),), strict=True)
        calls.clear()
        assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2)).shape == (1, 2)
        assert calls == ["hook"]  # of the module that torch.compile returns
        exported.module()
    remove()
