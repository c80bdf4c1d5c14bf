from __future__ import annotations

import torch

from fakedist.record.compiled_graphs import compilations


def test_each_compilation_is_told_with_its_end_and_none_without_one() -> None:
    reported: list[bool] = []

    def double(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    torch._dynamo.reset()
    with compilations(reported.append):
        compiled = torch.compile(double, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        assert reported == [True, False]
        compiled(torch.ones(2))
        assert reported == [True, False]
        torch._dynamo.reset()
        compiled(torch.ones(3))
    assert reported == [True, False] * 2
    torch._dynamo.reset()
    compiled(torch.ones(4))
    assert reported == [True, False] * 2
