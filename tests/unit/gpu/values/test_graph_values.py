"""Integers of a graph are computed as torch computes them, also from masks that are too large to be whole."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

from fakedist.gpu.values import graph_values, recipes
from fakedist.gpu.values.contents import Taint
from fakedist.gpu.values.graph_values import GraphRun, GraphValues, _Input
from fakedist.gpu.values.host import Host
from fakedist.record.compiled_graphs import IntegerPart, integers_of
from tests.support.idle_device import IdleDevice

Tensor = torch.Tensor
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TOKENS, WINDOW = 640, 100


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < WINDOW


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k < WINDOW) | (q >= k)


def documents(doc: Tensor) -> MaskMod:
    return lambda b, h, q, k: (doc[q] == doc[k]) & (q >= k)


def of_heads(widths: Tensor) -> MaskMod:
    return lambda b, h, q, k: (q >= k) & (q - k < widths[h])


def of_sequences(lengths: Tensor) -> MaskMod:
    return lambda b, h, q, k: (k < lengths[b]) | (q >= k)


DOCUMENTS = (torch.rand(TOKENS, generator=torch.Generator().manual_seed(3)) < 1 / 70).cumsum(0)
ONLY = torch.zeros(1)


def _tensors(mask: BlockMask) -> list[Tensor]:
    names = ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")
    found = [getattr(mask, f"{prefix}{name}") for prefix in ("", "full_") for name in names]
    return [each for each in found if each is not None]


def _part(function: Callable[[Tensor], list[Tensor]], given: Tensor) -> IntegerPart:
    graph = make_fx(function, tracing_mode="fake")(given).graph
    part = integers_of(graph, {})
    assert part is not None
    return IntegerPart.from_json(json.loads(json.dumps(part.as_json())))


def _run(part: IntegerPart, given: object, taint: Taint | None = None) -> GraphRun:
    return GraphRun(part, {name: _Input(given, taint) for name in part.inputs}, lambda tensor, value, taint: None)


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything of more elements than a few blocks is computed in pieces."""
    for module in (recipes, graph_values):
        monkeypatch.setattr(module, "PIECE", 20_000)


@pytest.mark.parametrize(
    ("of", "given", "sizes"),
    [
        (lambda _: causal, ONLY, {}),
        (lambda _: and_masks(causal, window), ONLY, {}),
        (lambda _: prefix, ONLY, {"BLOCK_SIZE": (32, 64)}),
        (documents, DOCUMENTS, {}),
        (documents, torch.arange(TOKENS) // WINDOW, {"BLOCK_SIZE": 64}),
        (lambda doc: and_masks(causal, or_masks(window, documents(doc))), DOCUMENTS, {"tokens": TOKENS - 37}),
        (of_heads, torch.tensor([64, 128, 300]), {"H": 3}),
        (of_sequences, torch.tensor([17, 400]), {"B": 2}),
        (of_sequences, torch.tensor([17, 400]), {"B": 2, "H": 2, "BLOCK_SIZE": (64, 128)}),
    ],
)
def test_a_block_mask_is_what_torch_makes_of_it(
    of: Callable[[Tensor], MaskMod], given: Tensor, sizes: dict[str, object]
) -> None:
    options = {"B": None, "H": None, "device": "cpu"} | sizes
    tokens = options.pop("tokens", TOKENS)

    def make(given: Tensor) -> list[Tensor]:
        return _tensors(create_block_mask(of(given), Q_LEN=tokens, KV_LEN=tokens, **options))  # type: ignore[arg-type]

    part = _part(make, given)
    run = _run(part, given)
    expected = make(given)
    assert set(part.outputs) == set(range(len(expected)))
    for place, tensor in enumerate(expected):
        found = run.known(part.outputs[place])
        assert found is not None, place
        assert torch.equal(found, tensor), place


def test_what_follows_from_made_up_values_is_not_known() -> None:
    def make(doc: Tensor) -> list[Tensor]:
        mask = create_block_mask(documents(doc), None, None, TOKENS, TOKENS, device="cpu")
        return [mask.kv_num_blocks, torch.arange(4)]

    part = _part(make, DOCUMENTS)
    taint = Taint()
    run = _run(part, DOCUMENTS, taint)
    value, found = run.of(part.outputs[0])
    assert isinstance(value, Tensor)
    assert found is taint
    assert run.known(part.outputs[0]) is None
    assert run.known(part.outputs[1]) is not None  # nothing of it is made up
    assert _run(part, None).known(part.outputs[0]) is None


def test_what_is_written_in_place_is_seen_by_what_reads_it_later() -> None:
    def make(given: Tensor) -> list[Tensor]:
        zeros = torch.zeros(8, dtype=torch.int64)
        before = zeros + 1
        torch.ops.aten.index_put_(zeros.view(2, 4), [torch.tensor([1]), given], torch.tensor(5))
        return [before, zeros * 2]

    given = torch.tensor([3])
    part = _part(make, given)
    run = _run(part, given)
    expected = make(given)
    assert [run.known(part.outputs[place]).tolist() for place in (0, 1)] == [each.tolist() for each in expected]  # type: ignore[union-attr]
    unknown = _run(part, None)
    assert unknown.known(part.outputs[1]) is None


def test_random_values_and_large_floats_are_left_out() -> None:
    def make(given: Tensor) -> list[Tensor]:
        drawn = torch.rand(8) < 0.5
        product = (given.float() @ torch.ones(8, 100_000)).argmax(-1)
        return [drawn, product, given + 1]

    part = _part(make, torch.arange(8).reshape(1, 8))
    assert list(part.outputs) == [2]


def test_a_graph_is_computed_once_for_the_same_inputs() -> None:
    part = _part(lambda given: [given + 1], torch.arange(4))
    values = GraphValues(Host(0))
    first = values.begin(part, [torch.arange(4)])
    assert values.begin(part, [torch.arange(4)]) is first
    assert values.begin(part, [torch.arange(1, 5)]) is not first


def test_buffers_and_results_get_their_values_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    device = IdleDevice(monkeypatch)
    numbers, taint = torch.arange(6), Taint()
    with device.on():
        fits, shaped, strided = (torch.empty(*size, dtype=torch.int64) for size in ((6,), (2, 3), (3, 2)))
        other, floats, made_up = torch.empty(6, dtype=torch.int64), torch.empty(6), torch.arange(6)
    for tensor, value, tainted in (
        (fits, numbers, None),
        (shaped, numbers, None),
        (strided.t(), numbers, None),
        (other, numbers[:5], None),
        (floats, numbers, None),
        (made_up, numbers, taint),
    ):
        device.graphs.give(tensor, value, tainted)
    assert device.host.taints.of(made_up) is taint
    known = [None if (values := device.known(each)) is None else values.tolist() for each in (fits, shaped, strided)]
    assert known == [[0, 1, 2, 3, 4, 5], [[0, 1, 2], [3, 4, 5]], None]
    assert [device.known(tensor) for tensor in (other, floats, made_up)] == [None] * 3
    device.graphs.give(fits, None, None)
    assert device.known(fits) is None


def test_a_large_result_gets_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    device, numbers = IdleDevice(monkeypatch), torch.arange(1100)
    part = _part(lambda given: [given[:, None] >= given[None]], numbers)
    with device.on():
        given, result = torch.arange(1100), torch.empty(1100, 1100, dtype=torch.bool)
    device.graphs.begin(part, [given]).returned([result])
    with device.on():
        counts = result.sum(1)
    known = device.known(counts)
    assert known is not None
    assert known.tolist() == list(range(1, 1101))
    assert device.graphs.begin(part, []).known(part.outputs[0]) is None


@pytest.mark.parametrize(("is_view", "mean"), [(True, 0.25), (False, None)])
def test_a_view_of_a_mask_keeps_its_mean(monkeypatch: pytest.MonkeyPatch, is_view: bool, mean: float | None) -> None:
    device, large = IdleDevice(monkeypatch), torch.zeros(2048, 1024, dtype=torch.bool)
    part = _part(lambda given: [given.view(2048, 8, 128) if is_view else given & given[:1]], large)
    with device.on():
        given = torch.empty(2048, 1024, dtype=torch.bool)
        result = given.view(2048, 8, 128) if is_view else torch.empty(2048, 1024, dtype=torch.bool)
    device.host.means.know(given, 0.25)
    device.graphs.begin(part, [given]).returned([result])
    assert device.host.means.of(result) == mean


def test_a_mask_that_would_take_too_long_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "MOST", TOKENS * TOKENS // 4)
    part = _part(
        lambda _: [create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu").kv_num_blocks], torch.zeros(1)
    )
    assert _run(part, ONLY).known(part.outputs[0]) is None
