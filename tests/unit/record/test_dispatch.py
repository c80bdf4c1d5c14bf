"""Every operation is seen, by whatever way it comes; and torch takes its own ways all the while."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fakedist import frames
from fakedist.record.dispatch import every_operation, no_operation, warnings_at_the_script

_KEY = torch._C._parse_dispatch_key("Fake")  # type: ignore[attr-defined]
_IS_BELOW_PYTHON = not torch._C._dispatch_keyset_full_after(_KEY).has(torch._C.DispatchKey.Python)  # type: ignore[attr-defined]


def _naming(names: list[str]) -> Callable[..., Any]:
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs)

    return run


@contextmanager
def seen(*, views: bool = False) -> Iterator[list[str]]:
    """Names of the operations that are seen, as they run."""
    names: list[str] = []
    with every_operation(_naming(names)) as interception:
        interception.see_views(views)
        yield names


@pytest.mark.skipif(not _IS_BELOW_PYTHON, reason="this torch passes views of tensor subclasses through the key")
def test_views_are_run_by_torch_alone_unless_they_are_asked_for() -> None:
    def views(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(x.view(2, 8).t().chunk(4)[0][1:].unbind(0)).exp()

    x = torch.arange(16.0)
    expected = views(x)
    with seen() as names:
        assert torch.equal(views(x), expected)
        assert names[:2] == ["stack", "exp"]
    with seen(views=True) as names:
        assert torch.equal(views(x), expected)
    assert names[:5] == ["view", "t", "split", "slice", "unbind"]
    names = []
    with every_operation(_naming(names)) as interception:
        for are_seen in (False, True, True, False):
            interception.see_views(are_seen)
            x.view(4, 4).t().neg()
    assert names == ["neg", *["view", "t", "neg"] * 2, "neg"]


def test_what_a_view_of_a_sparse_tensor_allocates_is_seen() -> None:
    sparse = torch.eye(3).to_sparse()
    with seen() as names:
        sparse.unsqueeze(0)
    assert "cat" in names or "unsqueeze" in names


def test_forward_and_backward_are_seen_and_gradients_are_written_in_place() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with seen() as names:
        y = x * 2
        (y.sin() + y.cos()).sum().backward()
    assert names[:4] == ["mul", "sin", "cos", "add"]
    # The two gradients of y are added in place; under a dispatch mode that would be another "add".
    assert names[-2:] == ["add_", "mul"]
    assert x.grad is not None
    with seen() as names:
        x[torch.tensor([0, 2])].sum().backward()
    assert "_index_put_impl_" in names
    assert "index_put" not in names


def test_what_an_operation_calls_is_not_seen_and_modes_entered_in_it_see_it() -> None:
    inside: list[str] = []

    class Inside(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            inside.append(str(func))
            return func(*args, **(kwargs or {}))

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Inside():
            return torch.ones(2) + func(*args, **kwargs)

    with every_operation(run):
        result = torch.zeros(2) + 1
    assert result.tolist() == [3.0, 3.0]
    assert "aten.ones.default" in inside


def test_parameters_and_subclasses_can_be_made_of_new_tensors() -> None:
    class Named(torch.Tensor):
        pass

    with seen() as names:
        layer = nn.Linear(3, 3)
        named = torch.zeros(2).as_subclass(Named)
        assert type(named + 1) is Named
    assert isinstance(layer.weight, nn.Parameter)
    assert names.count("add") == 1


class _Doubled(torch.Tensor):
    """A subclass that makes two operations of one."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [value.inner if isinstance(value, _Doubled) else value for value in args]
        func(*plain, **(kwargs or {}))
        return cls(func(*plain, **(kwargs or {})))


def test_of_a_subclass_its_operations_on_plain_tensors_are_seen() -> None:
    doubled = _Doubled(torch.ones(3))
    with seen() as names:
        result = torch.sin(doubled)
    assert isinstance(result, _Doubled)
    assert names == ["sin", "sin"]


def test_a_mode_of_the_scripts_own_comes_first_and_what_it_makes_is_seen_once() -> None:
    class Negative(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {})).neg()

    x = torch.ones(2)
    with seen() as names:
        with Negative():
            result = x + 1
        after = x * 3
    assert result.tolist() == [-2.0, -2.0]
    assert after.tolist() == [3.0, 3.0]
    assert names == ["add", "neg", "mul"]


def test_selective_checkpointing_works_and_is_seen() -> None:
    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = func == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    weight = torch.ones(3, 3, requires_grad=True)
    with seen() as names:
        result = checkpoint(
            lambda x: torch.sin(x @ weight).exp(),
            torch.ones(3, 3, requires_grad=True),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        result.sum().backward()
    assert names.count("mm") == 3  # forward and two gradients; it is not computed again
    assert names.count("sin") == 2


class _Passes(TorchDispatchMode):
    """A mode that changes nothing, and passes higher-order operators on."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Twice(HigherOrderOperator):
    """An operator that runs one, as ``cond`` does."""

    def __init__(self) -> None:
        super().__init__("fakedist_test_twice")

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x)


def _twice() -> _Twice:
    operator = _Twice()

    @operator.py_impl(torch._C.DispatchKey.CompositeExplicitAutograd)
    def dense(x: torch.Tensor) -> torch.Tensor:
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        return x.sin().cos()

    operator.py_impl(_Passes)(lambda mode, x: operator(x))
    operator.py_autograd_impl(lambda x: x.sin().cos())
    return operator


@pytest.mark.parametrize("made_before", [False, True])
@pytest.mark.parametrize("under_a_mode", [False, True])
def test_higher_order_operators_run_as_without_us_and_those_inside_are_seen(
    made_before: bool, under_a_mode: bool
) -> None:
    operator = _twice() if made_before else None
    with seen() as names:
        operator = operator or _twice()
        with _Passes() if under_a_mode else nullcontext():
            operator(torch.ones(2))
        assert names[-2:] == ["sin", "cos"]
    assert torch._C._dispatch_keyset_full().has(_KEY) == operator.non_fallthrough_keys.has(_KEY)


def test_shapes_alone_are_not_seen() -> None:
    with seen() as names:
        with FakeTensorMode():
            fake = nn.functional.embedding(torch.zeros(3, dtype=torch.long), torch.empty(10, 4))
        torch.ones(2)
    assert fake.shape == (3, 4)
    assert names == ["ones"]


def test_a_subclass_whose_dispatch_is_off_is_computed() -> None:
    """A compiler makes the shape of a tensor with odd strides so; torch then looks for a kernel by name."""
    with seen():
        odd = torch.empty(3, 3).set_(torch.randn(30).untyped_storage(), 2, (3, 3), (1, 3))
        shape = FakeTensorMode().from_tensor(odd)
    assert (shape.shape, shape.stride(), shape.storage_offset()) == ((3, 3), (1, 3), 2)


def test_other_threads_are_left_alone_and_autograds_are_not() -> None:
    elsewhere: list[torch.Tensor] = []
    with seen() as names:
        thread = threading.Thread(target=lambda: elsewhere.append(torch.ones(3).sin()))
        thread.start()
        thread.join()
        assert names == []
        torch.ones(3, requires_grad=True).exp().sum().backward()
    assert names[-1] == "mul"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_that_dynamo_would_trace_is_replaced_and_everything_is_undone(fails: bool) -> None:
    def state() -> tuple[object, ...]:
        operator, mode = torch._ops.HigherOrderOperator, TorchDispatchMode
        modes = mode.__enter__, mode.__exit__
        return *modes, torch._ops._compute_keyset, operator.__call__, operator.dispatch

    before, names = state(), list[str]()
    try:
        with seen() as names:
            assert before[2:] == state()[2:]
            torch.ones(2)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert state() == before
    assert not torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    torch.ones(2)
    assert names == ["ones"]
    with seen() as again:
        torch.ones(2)
    assert again == ["ones"]


def test_running_out_of_memory_keeps_no_argument_alive() -> None:
    """A script that catches the error has the memory of what only the failed operation held, as without us."""
    freed: list[str] = []

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.name == "aten::cos":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **kwargs)

    def temporary() -> torch.Tensor:
        x = torch.ones(4)
        weakref.finalize(x, freed.append, "the argument")
        return x

    with every_operation(run), pytest.raises(torch.OutOfMemoryError) as caught:
        temporary().cos()
    assert caught.tb is not None  # which keeps its frames
    assert freed == ["the argument"]


@pytest.mark.parametrize(("file", "is_ours"), [(f"{frames.OURS}record/dispatch.py", True), ("/job/train.py", False)])
def test_a_warning_of_the_recorder_names_the_scripts_line(
    file: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int]] = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, category, name, line, *more: shown.append((name, line)))
    with warnings_at_the_script():
        warnings.showwarning("text", UserWarning, file, 7)
    ((name, line),) = shown
    assert (name, line == 7) == (__file__ if is_ours else file, not is_ours)


def test_an_undefined_tensor_in_a_list_is_an_empty_one() -> None:
    """As FlashAttention 3 returns them: torch takes no None there from Python."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        return [result[0], None] if isinstance(result, list) else result

    with every_operation(run):
        first, undefined = torch._foreach_exp([torch.zeros(2), torch.zeros(2)])
    assert (first.tolist(), undefined.numel()) == ([1.0, 1.0], 0)


def test_higher_order_operators_run_while_operations_pass_by_the_key() -> None:
    left = torch.ones(2, 2, dtype=torch.int8)
    with no_operation({}):
        product = torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, left, left)
    assert product.tolist() == [[2, 2], [2, 2]]
