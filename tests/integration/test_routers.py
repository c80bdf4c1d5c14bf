"""Which choices by made-up values are a router's: those that send tokens to experts, and no metric's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fakedist.gpu.values.engine import ValueEngine

TOKENS, EXPERTS, WIDTH = 8192, 16, 64


def logits(num_choices: int = EXPERTS, rows: int = TOKENS) -> torch.Tensor:
    """Scores without values."""
    import torch

    return torch.randn(rows, WIDTH, device="cuda") @ torch.randn(WIDTH, num_choices, device="cuda")


def routing(engine: ValueEngine, *runs: Callable[[], None]) -> list[str]:
    """Those of some functions in which a router sends tokens."""
    from fakedist.rundir.sources import ROUTED

    found = []
    for run in runs:
        engine.invented()
        run()
        if any(row.operation == ROUTED for row in engine.invented()):
            found.append(run.__name__)
    return found


@on_virtual_gpu
def test_metrics_are_no_routers(engine: ValueEngine) -> None:
    import torch
    from torch.nn.functional import one_hot

    labels = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")

    def top_5_accuracy() -> None:
        predicted = logits(1000).topk(5, 1, True, True)[1].t()
        correct = predicted.eq(labels.view(1, -1).expand_as(predicted))
        for k in (1, 5):
            correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100 / TOKENS).item()

    def accuracy() -> None:
        (logits().argmax(1) == labels).float().mean().item()

    def dice() -> None:
        found, wanted = one_hot(logits().argmax(1), EXPERTS), one_hot(labels, EXPERTS)
        (2 * (found * wanted).sum(0) / (found.sum(0) + wanted.sum(0) + 1)).mean().item()

    def confusion() -> None:
        torch.bincount(logits().max(1)[1] * EXPERTS + labels, minlength=EXPERTS**2).tolist()

    def mean_reciprocal_rank() -> None:
        (logits(1000).topk(10, 1)[1] == labels[:, None]).cumsum(1).sum().item()

    def anchors() -> None:
        best = logits(8400, 32).topk(10, 1)[1]
        torch.zeros(32, 8400, dtype=torch.int8, device="cuda").scatter_add_(
            1, best, torch.ones_like(best, dtype=torch.int8)
        )

    def nucleus() -> None:
        best, order = logits(1000).sort(descending=True)
        dropped = best.softmax(-1).cumsum(-1) > 0.9
        dropped.scatter(1, order, dropped).sum().item()

    def up_to_the_first_end() -> None:
        is_end = logits() > 0
        has_end, ends = is_end.any(1), torch.full((TOKENS,), EXPERTS, device="cuda")
        ends[has_end] = is_end.int().argmax(1)[has_end]
        mask = torch.arange(EXPERTS, device="cuda") <= ends[:, None]
        logits()[mask].sum().item()

    metrics = (up_to_the_first_end, top_5_accuracy, accuracy, dice, confusion, mean_reciprocal_rank, anchors, nucleus)
    assert routing(engine, *metrics) == []


@on_virtual_gpu
def test_what_sends_tokens_to_experts_is_a_router(engine: ValueEngine) -> None:
    import torch
    from torch.nn.functional import one_hot

    x = torch.randn(TOKENS, WIDTH, device="cuda")

    def mixtral() -> None:
        mask = one_hot(logits().topk(2)[1], EXPERTS).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            torch.where(mask[expert].squeeze(0))

    def megatron() -> None:
        torch.zeros(TOKENS, EXPERTS, device="cuda").int().scatter(1, logits().topk(2)[1], 1).bool().sum(0).tolist()

    def deepseek() -> None:
        flat = logits().topk(2)[1].view(-1)
        x[flat.argsort() // 2]

    def masks() -> None:
        chosen = logits().topk(2)[1]
        for expert in range(EXPERTS):
            x[(chosen == expert).any(-1)]

    def torchtitan() -> None:
        torch.histc(logits().topk(2)[1].view(-1).float(), EXPERTS, 0, EXPERTS)

    def counted() -> None:
        torch.bincount(logits().topk(2)[1].view(-1), minlength=EXPERTS).tolist()

    def compared() -> None:
        (logits().topk(2)[1].unsqueeze(-1) == torch.arange(EXPERTS, device="cuda")).sum(1).nonzero()

    def switch() -> None:
        mask = one_hot(logits().argmax(1), EXPERTS)
        (mask.cumsum(0) - 1).mul(mask).sum(1)

    routers = (mixtral, megatron, deepseek, masks, torchtitan, counted, compared, switch)
    assert routing(engine, *routers) == [router.__name__ for router in routers]
    assert routing(engine, *routers) == []  # a line is reported once
