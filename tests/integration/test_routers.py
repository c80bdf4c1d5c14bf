"""Routers and metrics on the virtual GPU's operators; tests/unit/gpu/values/test_routing.py has each kind of both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import ProfileOnce
from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    from fakedist.gpu.values.engine import ValueEngine

TOKENS, EXPERTS, WIDTH = 8192, 16, 64
#: The logits are small, and no kernel computed them. topk is an operation, which the generated code calls.
COMPILED = f"""
import torch

@torch.compile
def pick(scores):
    probabilities, experts = (scores * 2).topk(2)
    return probabilities, experts, experts.view(-1)

scores = torch.randn(2048, 8192, device="cuda") @ torch.randn(8192, {EXPERTS}, device="cuda")
_, experts, flat = pick(scores)
print("COUNTS", *(torch.bincount(each.reshape(-1), minlength={EXPERTS}).tolist() for each in (experts, flat)))
"""


@on_virtual_gpu
def test_every_way_of_counting_agrees_with_the_load(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.values.routing import RunningLayer
    from fakedist.router_load import RouterLoad, RouterPass

    load = RouterLoad("zipf:0.7", seed=5)
    engine.route_by(load, 3, lambda: RunningLayer(0, in_backward=False, step=1))
    scores = torch.randn(TOKENS, WIDTH, device="cuda") @ torch.randn(WIDTH, EXPERTS, device="cuda")
    experts = scores.softmax(-1).topk(2)[1]
    expected = load.counts(RouterPass(0, 0, 0, TOKENS, EXPERTS, 2), 3).tolist()
    assert max(expected) > 2 * min(expected)
    mask = torch.zeros_like(scores).int().scatter(1, experts, 1).bool()
    counts = [mask.sum(0), torch.bincount(experts.view(-1), minlength=EXPERTS)]
    counts += [torch.histc(indices, EXPERTS, 0, EXPERTS) for indices in (experts.view(-1), experts.view(-1).float())]
    ends = torch.searchsorted(experts.view(-1).sort()[0], torch.arange(EXPERTS, device="cuda"), right=True)
    counts.append(ends.diff(prepend=ends.new_zeros(1)))
    assert [found.tolist() for found in counts] == [expected] * len(counts)
    assert [len(mask[:, expert].nonzero()) for expert in range(EXPERTS)] == expected
    again = torch.zeros_like(scores).scatter(1, experts, scores.gather(1, experts)).topk(2)[1]  # a dispatcher's
    assert torch.bincount(again.view(-1), minlength=EXPERTS).tolist() == expected


@on_virtual_gpu
def test_what_sends_tokens_to_experts_is_a_router_and_no_metric_is(engine: ValueEngine) -> None:
    import torch
    from torch.nn.functional import one_hot

    from fakedist.rundir.sources import ROUTED

    def chosen(num_choices: int) -> torch.Tensor:
        scores = torch.randn(TOKENS, WIDTH, device="cuda") @ torch.randn(WIDTH, num_choices, device="cuda")
        return scores.topk(2)[1]

    def top_2_accuracy() -> None:
        labels = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
        correct = chosen(1000).t().eq(labels.view(1, -1).expand(2, TOKENS))
        correct.reshape(-1).float().sum(0, keepdim=True).mul_(100 / TOKENS).item()

    def mixtral() -> None:
        mask = one_hot(chosen(EXPERTS), EXPERTS).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            torch.where(mask[expert].squeeze(0))

    def deepseek() -> None:
        torch.randn(TOKENS, WIDTH, device="cuda")[chosen(EXPERTS).view(-1).argsort() // 2]

    # They choose in one line, which is reported once.
    for run, is_router in ((top_2_accuracy, False), (mixtral, True), (deepseek, False)):
        engine.invented()
        run()
        assert any(row.operation == ROUTED for row in engine.invented()) is is_router, run.__name__


def test_a_compiled_router_picks_as_evenly(profile_once: ProfileOnce, tmp_path_factory: pytest.TempPathFactory) -> None:
    script = tmp_path_factory.mktemp("job") / "compiled_router.py"
    script.write_text(COMPILED)
    said = profile_once(script, options=("--json", "--no-kernels")).finished.stderr
    counts = [2048 * 2 // EXPERTS] * EXPERTS
    assert f"COUNTS {counts} {counts}" in said, said


@on_virtual_gpu
def test_a_router_of_one_expert_a_token_follows_the_load_by_any_operation(engine: ValueEngine) -> None:
    import torch

    from fakedist.gpu.values.routing import RunningLayer
    from fakedist.router_load import RouterLoad

    engine.route_by(RouterLoad("zipf:1", seed=5), 3, lambda: RunningLayer(0, in_backward=False, step=1))
    scores = torch.randn(1024, 512, device="cuda") @ torch.randn(512, EXPERTS, device="cuda")

    def counts(experts: torch.Tensor) -> list[int]:
        counted: list[int] = torch.bincount(experts.flatten(), minlength=EXPERTS).tolist()
        return counted

    for _ in range(2):  # of no values, then of made-up ones that the script has read
        for experts in (scores.argmax(-1), scores.max(-1)[1], scores.max(-1, keepdim=True)[1], scores.topk(1)[1]):
            assert max(counts(experts)) > 2 * min(counts(experts))
        read = torch.tensor(scores.tolist())
    assert torch.equal(scores.max(-1)[0].cpu(), read.amax(-1))
    assert torch.equal(scores.max().cpu(), read.max())
