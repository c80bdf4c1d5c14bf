"""Made-up values agree with each other: whatever the script asks of one, in whichever way, follows from the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from tests.support.virtual_worker import invented_values, on_virtual_gpu

if TYPE_CHECKING:
    import torch

    from fakedist.gpu.values.engine import ValueEngine


def _loss(requires_grad: bool = True) -> torch.Tensor:
    """A scalar that a kernel too large for the host wrote."""
    import torch

    weight = torch.randn(2048, 512, device="cuda", requires_grad=requires_grad)
    return (torch.randn(64, 2048, device="cuda") @ weight).mean()


@on_virtual_gpu
def test_comparisons_agree_with_the_value(engine: ValueEngine) -> None:
    import torch

    for _ in range(8):
        asked_first, read_first = _loss(requires_grad=False), _loss(requires_grad=False)
        is_positive, is_small = bool(asked_first > 0), bool(asked_first < 0.5)
        value = asked_first.item()
        assert (is_positive, is_small) == (value > 0, value < 0.5)
        value = read_first.item()
        assert bool(read_first > 0) == (value > 0)
        assert bool(read_first.abs() < 1e9)
        assert read_first.cpu().item() == float(read_first) == read_first.tolist() == value
        assert torch.equal(read_first, read_first.clone())
        assert torch.allclose(read_first, read_first + 1e-12)
        assert torch.maximum(read_first, asked_first).item() == max(value, asked_first.item())
        assert torch.where(read_first > 0, 1, 2).item() == (1 if value > 0 else 2)
        assert read_first.clamp(min=0.25).item() == max(value, 0.25)


@on_virtual_gpu
def test_a_loss_is_positive_however_it_is_read(engine: ValueEngine) -> None:
    import torch

    for _ in range(8):
        loss = _loss()
        assert loss.detach().item() > 0
        assert bool(_loss() > 0)
        assert _loss().detach().clone().cpu() > 0
        assert (_loss() / 4).item() > 0
        assert _loss().float().detach().tolist() > 0
        total = torch.zeros((), device="cuda")
        losses = [_loss() for _ in range(3)]
        for each in losses:
            total += each.detach()
        mean = (total / 3).item()
        assert math.isclose(mean, sum(each.item() for each in losses) / 3, rel_tol=1e-5)


@on_virtual_gpu
def test_a_value_is_counted_once_and_only_when_it_is_read(engine: ValueEngine) -> None:
    loss = _loss()
    scaled, is_positive = loss / 4, loss > 0
    assert invented_values(engine) == 0
    assert bool(is_positive)
    assert invented_values(engine) == 1
    assert scaled.item() == loss.item() / 4
    assert invented_values(engine) == 0


@on_virtual_gpu
def test_strict_values_raise_where_a_value_is_read_and_not_before() -> None:
    import torch

    from fakedist.errors import InventedValueError
    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.operations import Operations
    from fakedist.record.position import Position

    strict = ValueEngine(0, strict=True)
    with Operations(Position(), strict.execute, lambda: None, lambda text: None):
        loss = _loss()
        metrics = torch.zeros(4, device="cuda")
        metrics[3] = loss.detach() / 2
        assert metrics[:3].tolist() == [0, 0, 0]
        assert not torch.isnan(loss)
        with pytest.raises(InventedValueError, match=r"test_values_agree\.py"):
            metrics[3].item()


@on_virtual_gpu
def test_a_clipped_norm_agrees_with_its_coefficient(engine: ValueEngine) -> None:
    import torch

    weights = [torch.randn(1024, 512, device="cuda", requires_grad=True) for _ in range(12)]
    for _ in range(4):
        sum((weight * 2).sum() for weight in weights).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        assert bool(norm >= 0)
        assert bool(norm < 1e6)
        assert not torch.isnan(norm)
        value = norm.item()
        assert math.isclose((1.0 / (norm + 1e-6)).clamp(max=1.0).item(), min(1.0, 1 / (value + 1e-6)), rel_tol=1e-5)
        assert bool(norm > 0.7) == (value > 0.7)


@on_virtual_gpu
def test_reductions_of_each_tokens_loss_follow_from_them(engine: ValueEngine) -> None:
    import torch

    logits = torch.randn(4096, 512, device="cuda") @ torch.randn(512, 2000, device="cuda")
    labels = torch.zeros(4096, dtype=torch.long, device="cuda")
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    total, largest, above = losses.sum(), losses.max(), (losses > 1).sum()
    values = losses.tolist()
    assert min(values) >= 0
    assert largest.item() == max(values)
    assert above.item() == sum(value > 1 for value in values)
    assert math.isclose(total.item(), sum(values), rel_tol=1e-3)


@on_virtual_gpu
def test_predictions_are_those_that_are_compared_with_labels(engine: ValueEngine) -> None:
    import torch

    logits = torch.randn(32, 4096, device="cuda") @ torch.randn(4096, 10, device="cuda")
    labels = torch.arange(32, device="cuda") % 7
    predicted = logits.argmax(-1)
    correct = (predicted == labels).sum()
    expected = sum(a == b for a, b in zip(predicted.tolist(), labels.tolist(), strict=True))
    assert correct.item() == expected
    assert (predicted == labels).float().mean().item() == expected / 32
    best = logits.max(dim=1)
    assert best.values.tolist() == logits.gather(1, best.indices[:, None]).flatten().tolist()
    assert max(best.values.tolist()) == logits.max().item() == max(max(row) for row in logits.tolist())


@on_virtual_gpu
def test_a_routers_experts_stay_even_where_its_logits_are_few(engine: ValueEngine) -> None:
    import torch

    logits = torch.randn(16, 16384, device="cuda") @ torch.randn(16384, 8, device="cuda")
    probabilities = logits.softmax(-1)
    weights, experts = torch.topk(probabilities, 2)
    assert torch.bincount(experts.flatten(), minlength=8).tolist() == [4] * 8
    assert weights.tolist() == probabilities.gather(1, experts).tolist()


@on_virtual_gpu
def test_memory_that_is_written_again_keeps_no_old_value(engine: ValueEngine) -> None:
    import torch

    loss = _loss(requires_grad=False)
    assert loss.item() == loss.item()
    loss.fill_(2.5)
    assert loss.item() == 2.5
    invented_values(engine)
    assert bool(loss > 2)
    assert engine.invented() == []
    first = _loss(requires_grad=False)
    value, address = first.item(), first.data_ptr()
    del first
    second = torch.empty((), device="cuda")
    assert second.data_ptr() == address
    assert engine.is_undefined(second)
    assert (second + 0).item() == second.item() != value
    running = torch.zeros(3, device="cuda")
    running[1] = _loss()
    running[1:2].copy_(torch.tensor([4.0]))
    assert running.tolist() == [0, 4, 0]
    invented_values(engine)
    running[2] = _loss()
    assert running[:2].tolist() == [0, 4]
    assert invented_values(engine) == 0
    assert running[2].item() > 0
    assert invented_values(engine) == 1


@on_virtual_gpu
def test_what_follows_from_made_up_values_is_finite(engine: ValueEngine) -> None:
    import torch

    for _ in range(8):
        value = _loss(requires_grad=False)
        count = torch.empty((), dtype=torch.long, device="cuda")
        for result in (value.sqrt(), value.log(), value / count, (value * 1e30) ** 3):
            assert torch.isfinite(result)
            assert math.isfinite(result.item())
    masked = torch.full((4,), -math.inf, device="cuda")
    masked[0] = _loss()
    assert masked[1:].tolist() == [-math.inf] * 3
    assert (masked * 1.0).isinf().sum().item() == 3
    assert masked.softmax(0).tolist() == [1, 0, 0, 0]


@on_virtual_gpu
def test_loops_that_wait_for_an_error_end(engine: ValueEngine) -> None:
    large = _loss
    rounds = 0
    while bool(large(requires_grad=False).abs() > 1e-6):
        rounds += 1
        assert rounds < 5_000
    read = 0
    while large(requires_grad=False).abs().item() > 1e-6:
        read += 1
        assert read < 5_000
    reached = 0
    while not bool(large(requires_grad=False) > 1e9):
        reached += 1
        assert reached < 5_000
    assert (rounds, read, reached) == (0, 0, 0)
    (note,) = engine.decisions()
    assert note.code == "branches_made_up"
    assert note.text.count(f"{__file__}:") == 3


@on_virtual_gpu
def test_the_note_names_the_branches_that_hang_on_made_up_values(engine: ValueEngine) -> None:
    import torch

    known = torch.ones((), device="cuda")
    assert bool(known > 0)
    loss = _loss()
    assert not torch.isnan(loss)
    assert math.isfinite(loss.item())
    assert engine.decisions() == []
    if bool(loss > 0.1):
        pass
    note = engine.decisions()[0].text
    assert note.count("test_values_agree.py:") == 1
    assert "once" in note


@on_virtual_gpu
def test_values_are_those_of_the_seed() -> None:
    import torch

    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.operations import Operations
    from fakedist.record.position import Position

    def run(seed: int) -> list[float]:
        other = ValueEngine(seed)
        with Operations(Position(), other.execute, lambda: None, lambda text: None):
            logits = torch.randn(64, 512, device="cuda") @ torch.randn(512, 2048, device="cuda")
            losses = logits.square().mean(1)
            return [*(losses / 2).tolist(), losses.sum().item(), float(bool(losses[0] > losses[1]))]

    assert run(3) == run(3) != run(4)
