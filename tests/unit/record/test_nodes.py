"""Nodes of autograd's graph, and the operations that made them or that they run, noted in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fakedist.record.dispatch import every_operation
from fakedist.record.nodes import Nodes, watched_functions
from fakedist.rundir.rows import FrameRow


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def noted(program: Callable[[], torch.Tensor]) -> tuple[dict[int, list[str]], list[tuple[str, int]]]:
    """By node, the operation or the functions of the stack that made it; and the operations that nodes ran."""
    nodes, names = Nodes(lambda: 0), []
    stacks: list[list[str]] = []

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(func._schema.name.removeprefix("aten::"))
        is_in_place = func._schema.is_mutable
        nodes.operation(len(names) - 1, allocates=not func.is_view and not is_in_place)
        return func(*args, **kwargs)

    def number_of(rows: list[FrameRow]) -> int:
        stacks.append([row.function for row in rows])
        return len(stacks) - 1

    nodes.is_on = True
    with watched_functions(nodes.function), every_operation(run, None, nodes.view):
        program().backward()
    made, ran, _ = nodes.take(number_of)
    columns = [memoryview(made.op).cast("q"), memoryview(made.sequence).cast("q"), memoryview(made.stack).cast("i")]
    first: dict[int, list[str]] = {}
    for op, sequence, stack in zip(*columns, strict=True):
        first.setdefault(sequence, [names[op]] if op >= 0 else stacks[stack])
    rows = zip(memoryview(ran.op).cast("q"), memoryview(ran.sequence).cast("q"), strict=True)
    return first, [(names[op], sequence) for op, sequence in rows]


def test_a_node_is_made_by_the_first_operation_that_sees_its_number() -> None:
    x = torch.ones(8, requires_grad=True)
    kept: list[torch.Tensor] = []

    def program() -> torch.Tensor:
        kept.append(x.sin())
        kept.append(torch.ones(8))  # makes none
        kept.append(kept[0] * kept[1])
        return kept[2].sum()

    made, ran = noted(program)
    numbers = [tensor.grad_fn._sequence_nr() for tensor in (kept[0], kept[2])]  # type: ignore[union-attr]
    assert [made[number] for number in numbers] == [["sin"], ["mul"]]
    assert ("cos", numbers[0]) in ran
    assert [name for name, number in ran if number == numbers[1]] == ["mul"]


def test_views_writes_and_functions_in_python_have_the_stack_of_where_they_run() -> None:
    x = torch.ones(8, requires_grad=True)
    kept: list[torch.Tensor] = []

    def slices() -> torch.Tensor:
        return (x * 1)[:4]

    def writes(y: torch.Tensor) -> torch.Tensor:
        return (y + 1).relu_()

    def program() -> torch.Tensor:
        kept.append(slices())
        kept.append(Double.apply(kept[0]))
        kept.append(writes(kept[1]))
        return kept[2].sum()

    made, ran = noted(program)
    numbers = [tensor.grad_fn._sequence_nr() for tensor in kept]  # type: ignore[union-attr]
    assert "slices" in made[numbers[0]]
    assert "program" in made[numbers[1]]
    assert "forward" not in made[numbers[1]]
    assert "writes" in made[numbers[2]]
    assert ("slice_backward", numbers[0]) in ran or ("zeros", numbers[0]) in ran
    assert ("threshold_backward", numbers[2]) in ran


def test_a_write_to_a_view_is_known_by_the_operation_that_wrote() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    kept: list[torch.Tensor] = []

    def writes() -> None:
        kept[0][:, 0] = kept[1]

    def program() -> torch.Tensor:
        kept.extend([x * 1, x.sum(1)])
        writes()
        return kept[0].sum()

    made, ran = noted(program)
    number = kept[0].grad_fn._sequence_nr() - 1  # type: ignore[union-attr]
    assert "writes" in made[number]
    assert number in [sequence for _, sequence in ran]
    assert number + 1 not in [sequence for _, sequence in ran]


def test_nothing_is_noted_while_it_is_off_and_torchs_class_is_as_before() -> None:
    nodes = Nodes(lambda: 0)
    with watched_functions(nodes.function):
        Double.apply(torch.ones(2, requires_grad=True))
    nodes.operation(0, allocates=True)
    assert not nodes.take(len)[0].op
    assert "__init__" not in vars(torch.autograd.function.BackwardCFunction)


def test_an_operation_of_a_timed_step_has_the_stack_that_called_it_once() -> None:
    nodes, stacks = Nodes(lambda: None), []
    nodes.stack(3)
    nodes.is_on = True

    def caller() -> None:
        nodes.stack(4)

    caller()

    def number_of(rows: list[FrameRow]) -> int:
        stacks.append([row.function for row in rows])
        return 7

    _, _, called = nodes.take(number_of)
    assert (memoryview(called.op).cast("q").tolist(), memoryview(called.stack).cast("i").tolist()) == ([4], [7])
    assert "caller" in stacks[0]
    assert not nodes.take(number_of)[2].op
