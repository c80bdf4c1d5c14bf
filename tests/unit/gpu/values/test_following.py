"""Values that follow: what torch computes is what the engine knows, also of large tensors, or it knows nothing.

Ordinary code runs on a device that computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.functional import pad

from fakedist.gpu.values import following, recipes
from fakedist.gpu.values.following import FEW, MANY
from tests.support.idle_device import IdleDevice

pytestmark = pytest.mark.usefixtures("kept_kernels")
N = 1104  # a mask of N x N elements is large, and too large to be computed whole
Tensor = torch.Tensor


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleDevice]:
    monkeypatch.setattr(recipes, "WHOLE", N * N - 1)
    monkeypatch.setattr(recipes, "PIECE", N * N // 3)
    with IdleDevice(monkeypatch).on() as device:
        yield device


def lines() -> tuple[Tensor, Tensor]:
    return torch.arange(N)[:, None], torch.arange(N)[None]


def causal() -> Tensor:
    q, k = lines()
    return q >= k


def changed(mask: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    change(mask)
    return mask


def many(number: int) -> Tensor:
    """Counts of numbers that so many operations have made, after that which compares."""
    numbers = causal()
    for _ in range(number):
        numbers = numbers + 1
    return numbers.sum(1)


PROGRAMS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: causal().sum(1),
    "columns that are kept": lambda: causal().sum(0, keepdim=True),
    "both dimensions": lambda: causal().sum((0, 1), keepdim=True),
    "all elements": lambda: causal().sum(),
    "a count": lambda: (lines()[0] - lines()[1]).count_nonzero(1),
    "any": lambda: (lines()[0] + lines()[1] > 2 * N - 40).any(1),
    "all": lambda: (lines()[0] * lines()[1] >= 0).all(0),
    "the largest": lambda: torch.where(causal(), lines()[0] - lines()[1], -7).amax(1),
    "the smallest": lambda: (lines()[0] * 3 % 17 + lines()[1] % 5).amin(0, keepdim=True),
    "sums of numbers": lambda: (lines()[0] // 3 - lines()[1].clamp(5, 700)).sum(1),
    "shifts": lambda: ((lines()[0] << 2) ^ (lines()[1] >> 1)).sum(0),
    "documents": lambda: ((torch.arange(N) * 7 % 13)[:, None] == (torch.arange(N) * 7 % 13)[None]).sum(1),
    "padding": lambda: pad(causal(), (5, 3, 2, 0), value=True).sum(0),
    "padding that cuts": lambda: pad(causal(), (-5, 3, 0, -40)).sum(1),
    "no padding": lambda: pad(causal(), (0, 0, 0, 0)).sum(1),
    "a part that is counted": lambda: causal()[5:, 8:].sum((0, 1)),
    "a part": lambda: causal()[100:1001:3, 7:].sum(1),
    "transposed": lambda: causal().t()[:, 10:].sum(1),
    "contiguous after that": lambda: causal().t().contiguous().sum(0),
    "dimensions of one": lambda: causal().t().unsqueeze(1).logical_not()[None].sum((0, 1, 2)),
    "strides of one": lambda: (
        torch.empty_strided((N, 1, N), (N, 7, 1), dtype=torch.bool).copy_(causal()[:, None]).sum(2)
    ),
    "another order": lambda: torch.empty_strided((N, N), (1, N), dtype=torch.int32).copy_(causal()).sum(0),
    "reshaped": lambda: causal().reshape(2, N // 2, N).sum((0, 2)),
    "filled": lambda: torch.full((N, N), 3, dtype=torch.int32).sum(1),
    "filled in place": lambda: changed(torch.empty(N, N, dtype=torch.int32), lambda x: x.fill_(4)).sum(0),
    "zeros and ones": lambda: (torch.zeros(N, N, dtype=torch.int32) + torch.ones_like(causal(), dtype=torch.int32)).sum(
        0
    ),
    "more zeros and ones": lambda: sum(
        (
            torch.zeros_like(causal(), dtype=torch.int32),
            causal().new_zeros(N, N, dtype=torch.int32),
            causal().new_ones(N, N, dtype=torch.int32),
            torch.ones(N, N, dtype=torch.int32),
            changed(torch.empty(N, N, dtype=torch.int32), lambda x: x.zero_()),
        ),
        causal(),
    ).sum(1),
    "as many operations as are followed": lambda: many(62),
    "copied": lambda: changed(torch.empty(N, N, dtype=torch.bool), lambda x: x.copy_(causal())).sum(1),
    "a copied row": lambda: changed(torch.empty(N, N, dtype=torch.int32), lambda x: x.copy_(torch.arange(N))).sum(1),
    "changed in place": lambda: changed(causal(), lambda x: x.logical_and_(lines()[0] < 99)).sum(0),
    "another type": lambda: causal().to(torch.int32).sum(1),
    "masked": lambda: (lines()[0] + lines()[1]).masked_fill(causal(), 1).sum(1),
    "no rows": lambda: causal()[:0].sum(1),
    "the second of two results": lambda: torch.arange(200_000).flip(0).sort().indices[:9] * 2,
    "small": lambda: torch.arange(12).view(3, 4).float().softmax(1).argmax(0),
    "small and in place": lambda: changed(torch.zeros(4, 4), lambda x: x[1:3].fill_(2.5)),
    "stacked": lambda: torch.stack([torch.arange(4), torch.ones(4, dtype=torch.int64)]).cumsum(1),
    "a list": lambda: torch._foreach_add([torch.ones(2), torch.arange(3.0)], 1.0)[1],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_engine_knows_what_torch_computes(device: IdleDevice, name: str) -> None:
    result = PROGRAMS[name]()
    known = device.known(result)
    assert known is not None
    with device.aside():
        expected = PROGRAMS[name]()
    assert (known.dtype, known.tolist()) == (expected.dtype, expected.tolist())
    assert device.made_up() == {}


def test_the_oldest_recipes_are_forgotten_if_they_keep_too_much(
    device: IdleDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MOST_BYTES", 5 * 2 * 8 * N)
    kept = [causal() for _ in range(9)]
    counts = [mask.sum(1) for mask in kept]
    assert [device.known(count) is not None for count in counts] == [False] * 4 + [True] * 5
    del kept[4:]
    counts = [mask.sum(1) for mask in [causal() for _ in range(5)]]
    assert all(device.known(count) is not None for count in counts)


UNKNOWN: dict[str, Callable[[], Tensor]] = {
    "too many operations": lambda: many(63),
    "a part was written": lambda: changed(causal(), lambda x: x[5:].fill_(True)).sum(1),
    "floats that are large": lambda: torch.ones(N, N).cumsum(0).sum(1),
    "a part of its storage": lambda: torch.empty(N, N + 1, dtype=torch.bool)[:, 1:].copy_(causal()).sum(1),
    "a random mask": lambda: (torch.rand(N, N) > 0.5).sum(1),
    "of unknown numbers": lambda: (torch.empty(N, 1, dtype=torch.int64) > torch.arange(N)).any(1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_known_of_what_does_not_follow(device: IdleDevice, name: str) -> None:
    assert device.known(UNKNOWN[name]()) is None


@pytest.mark.parametrize(("number", "is_made_up"), [(FEW, True), (FEW + 1, False)])
def test_few_missing_operands_are_made_up_and_results_of_them_are_not_known(
    device: IdleDevice, number: int, is_made_up: bool
) -> None:
    result = torch.empty(number) + torch.ones(number)
    assert device.is_undefined(result) is not is_made_up
    assert device.known(result) is None


@pytest.mark.parametrize(("number", "is_made_up"), [(8, True), (9, False)])
def test_up_to_eight_missing_operands_are_made_up(device: IdleDevice, number: int, is_made_up: bool) -> None:
    assert device.is_undefined(torch.stack([torch.empty(2) for _ in range(number)])) is not is_made_up


@pytest.mark.parametrize(("number", "is_made_up"), [(MANY, True), (MANY + 1, False)])
def test_many_missing_operands_are_made_up_to_be_compared(device: IdleDevice, number: int, is_made_up: bool) -> None:
    assert device.is_undefined(torch.empty(number) > torch.arange(float(number))) is not is_made_up


def test_the_logarithm_of_a_value_that_was_made_up_is_finite_and_isnan_of_it_is_certain(device: IdleDevice) -> None:
    logarithms = torch.empty(64).log()
    assert torch.isfinite(logarithms).all().item()
    isnan = torch.empty(64).isnan()
    known = device.known(isnan)
    assert known is not None
    assert not any(known.tolist())


def test_the_best_of_scores_that_were_made_up_are_spread_evenly_with_their_scores(device: IdleDevice) -> None:
    scores = torch.empty(4, 8) + torch.ones(8)
    values, indices = scores.topk(2)
    chosen, best, read = device.read(indices), device.read(values), device.read(scores)
    assert device.made_up() == {"aten.topk.default": 8, "print": 8}
    with device.aside():
        assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [1] * 8
        assert torch.equal(best, read.gather(1, chosen))


def test_part_of_a_large_tensor_is_known_with_its_values(device: IdleDevice) -> None:
    known = device.known(causal()[1:900:2])
    assert known is not None
    with device.aside():
        assert torch.equal(known, causal()[1:900:2])


def unknown_mask() -> Tensor:
    return torch.empty(N, N, dtype=torch.bool)


READS: dict[str, tuple[Callable[[], object], object]] = {
    "positions of half a mask": (lambda: len(unknown_mask().nonzero()), N * N // 2),
    "positions in each dimension": (lambda: len(unknown_mask().nonzero(as_tuple=True)[1]), N * N // 2),
    "selected by half a mask": (lambda: len(torch.empty(N, N).masked_select(unknown_mask())), N * N // 2),
    "selected by each row": (lambda: len(torch.empty(3, N, N).masked_select(unknown_mask())), 3 * N * N // 2),
    "equal shapes": (lambda: torch.equal(torch.empty(N, N), torch.empty(N, N)), True),
    "other shapes": (lambda: torch.equal(torch.empty(N, N), torch.empty(N, N + 1)), False),
    "bins": (
        lambda: torch.bincount(torch.empty(N * N, dtype=torch.int64), minlength=7).tolist(),
        [174117] * 4 + [174116] * 3,
    ),
    "rows of half a mask": (lambda: len(torch.empty(N, 2)[torch.empty(N, N, dtype=torch.bool).any(1)]) <= N, True),
    "a count of half a mask": (lambda: unknown_mask().sum().item(), N * N // 2),
    "counts of rows": (lambda: [unknown_mask().sum(1)[row].item() for row in (0, 9)], [N // 2, N // 2]),
    "a routed mask": (lambda: routed()[0].item(), N * 2 // 8),
    "losses": (lambda: [(torch.empty(N, N).requires_grad_() * 2).mean().item() > 0 for _ in range(6)], [True] * 6),
    "no losses": (lambda: len({(torch.empty(N, N) * 2).mean().item() > 0 for _ in range(20)}), 2),
    "draws": (lambda: torch.multinomial(torch.empty(4, N * N), 3).shape, (4, 3)),
    "distinct numbers": (lambda: torch.empty(N * N, dtype=torch.int64).unique().tolist(), [0]),
}
KNOWN_READS: dict[str, tuple[Callable[[], object], object]] = {
    "positions of none": (lambda: len(torch.empty(N, N).isnan().nonzero()), 0),
    "an element of a known mask": (lambda: torch.empty(N, N).isnan().logical_not()[3, 4].item(), True),
    "any that is not a number": (lambda: torch.empty(N, N).isnan().any().item(), False),
    "all finite": (lambda: torch.isfinite(torch.empty(N, N)).all().item(), True),
    "a count of none": (lambda: torch.empty(N, N).isnan().sum().item(), 0),
    "counts of all": (lambda: torch.empty(N, N).isnan().logical_not().sum(0)[5].item(), N),
    "a loss that is not negative": (lambda: (torch.empty(N, N).square().mean() >= 0).item(), True),
    "a norm that is finite": (lambda: torch.linalg.vector_norm(torch.empty(N, N)).isinf().item(), False),
    "true elements that a scatter has values for": (lambda: scattered().sum().item(), N * N),
    "a factorisation that worked": (lambda: torch.linalg.cholesky_ex(torch.empty(300, 300))[1].item(), 0),
    "all selected": (lambda: len(torch.empty(N, N)[torch.empty(N, N).isfinite()]), N * N),
}


def scattered() -> Tensor:
    mask = unknown_mask()
    torch.zeros(N, N).masked_scatter(mask, torch.zeros(N * N))
    return mask


def routed() -> Tensor:
    experts = torch.empty(N, N, 1).expand(N, N, 8)[0].topk(2).indices
    return torch.zeros(N, 8, dtype=torch.bool).scatter(1, experts, True).sum(0)


def test_how_many_of_a_large_mask_are_true_is_one_value(device: IdleDevice) -> None:
    unknown_mask().nonzero()
    assert device.made_up() == {"aten.nonzero.default": 1}


@pytest.mark.parametrize("name", [*READS, *KNOWN_READS])
def test_what_the_host_reads_of_large_tensors_follows_from_what_is_known(device: IdleDevice, name: str) -> None:
    read, expected = (READS | KNOWN_READS)[name]
    assert read() == expected
    assert bool(device.made_up()) is (name in READS)
