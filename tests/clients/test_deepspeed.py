"""DeepSpeed's flat memory: what each category and layer has of it follows from shapes and from DeepSpeed's rules."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import RunEntry
from tests.clients.running import Ran

# As in the job.
HIDDEN, LAYERS, VOCABULARY, BUCKET = 1024, 4, 8192, 10_000_000
WORLD = 64
BF16, FP32 = 2, 4
BLOCK = {
    "norm": [(HIDDEN,), (HIDDEN,)],
    "up": [(4 * HIDDEN, HIDDEN), (4 * HIDDEN,)],
    "down": [(HIDDEN, 4 * HIDDEN), (HIDDEN,)],
}
#: (layer, elements) of each parameter in the order of ``model.parameters()``.
PARAMETERS = [
    ("embed", VOCABULARY * HIDDEN),
    *(
        (f"blocks.{at}.{name}", shape[0] * (shape[1] if len(shape) > 1 else 1))
        for at in range(LAYERS)
        for name, shapes in BLOCK.items()
        for shape in shapes
    ),
    ("head", VOCABULARY * HIDDEN),
]
NUMBER = sum(elements for _, elements in PARAMETERS)


def rounded(bytes_: int) -> int:
    """The bytes that the allocator gives for a request."""
    return -(-bytes_ // 512) * 512


def held(ran: Ran, category: str) -> dict[str, int]:
    """Bytes of a category that layers hold when the run ends, shared blocks divided; "" for outside of modules."""
    blocks, names = ran.table("blocks"), ran.table("layers")["name"]
    alive = blocks[(blocks["category"] == category) & (blocks["free_event"] >= len(ran.table("events")))]
    shares = ran.table("shares")
    shares = shares[shares["block"].isin(alive.index)]
    alone = alive[~alive.index.isin(shares["block"])]
    found: dict[Any, int] = {}
    for layer, bytes_ in [*zip(shares["layer"], shares["bytes"]), *zip(alone["layer"], alone["bytes"])]:  # noqa: B905
        found[names[layer]] = found.get(names[layer], 0) + int(bytes_)
    return found


def of_partition(rank: int) -> dict[str, int]:
    """Elements of each layer in a rank's partition of the flat parameters, which are padded to 2 elements a rank."""
    size = -(-NUMBER // (2 * WORLD)) * 2
    start, end, offset = rank * size, (rank + 1) * size, 0
    found: dict[str, int] = {}
    for layer, elements in PARAMETERS:
        inside = min(end, offset + elements) - max(start, offset)
        if inside > 0:
            found[layer] = found.get(layer, 0) + inside
        offset += elements
    return found


@pytest.fixture(scope="module")
def zero_2(ran: RunEntry) -> Ran:
    return ran("DeepSpeed: ZeRO-2", 31)


@pytest.fixture(scope="module")
def zero_3(ran: RunEntry) -> Ran:
    return ran("DeepSpeed: ZeRO-3", 63)


def test_zero_2_holds_all_parameters_flat_and_each_layer_has_its_own(zero_2: Ran) -> None:
    found = held(zero_2, "parameter")
    padded = -(-NUMBER // (2 * WORLD)) * 2 * WORLD
    assert sum(found.values()) == rounded(BF16 * padded)
    for layer in {name for name, _ in PARAMETERS}:
        assert found[layer] == BF16 * sum(elements for name, elements in PARAMETERS if name == layer)


def test_zero_2_optimizes_a_partition_in_fp32_which_is_its_layers(zero_2: Ran) -> None:
    """The master copy and two moments; a partition that crosses layers is divided."""
    found = held(zero_2, "optimizer_state")
    expected = {layer: 3 * FP32 * elements for layer, elements in of_partition(31).items()}
    assert sum(found.values()) == 3 * rounded(FP32 * sum(of_partition(31).values()))
    assert {layer: found[layer] for layer in expected} == pytest.approx(expected, abs=3 * 511)
    assert all(not bytes_ or layer in expected for layer, bytes_ in found.items())


def test_zero_2_reduces_gradients_in_buckets_that_are_gradients(zero_2: Ran) -> None:
    blocks = zero_2.table("blocks")
    buckets = blocks[blocks["requested_bytes"] == BF16 * BUCKET]
    assert set(buckets["category"].astype(str)) == {"gradient"}
    assert set(buckets["phase"].astype(str)) <= {"forward", "backward"}


def test_zero_3_holds_a_part_of_each_parameter_in_each_precision(zero_3: Ran) -> None:
    part = sum(-(-elements // WORLD) for _, elements in PARAMETERS)
    assert sum(held(zero_3, "optimizer_state").values()) == 3 * rounded(FP32 * part)
    states = held(zero_3, "optimizer_state")
    for layer in {name for name, _ in PARAMETERS}:
        elements = sum(-(-elements // WORLD) for name, elements in PARAMETERS if name == layer)
        assert states[layer] == pytest.approx(3 * FP32 * elements, abs=3 * 511)


def test_zero_3_keeps_one_bucket_and_a_partition_of_the_gradients(zero_3: Ran) -> None:
    part = sum(-(-elements // WORLD) for _, elements in PARAMETERS)
    blocks = zero_3.table("blocks")
    alive = blocks[(blocks["category"] == "gradient") & (blocks["free_event"] >= len(zero_3.table("events")))]
    assert sorted(alive["requested_bytes"]) == [BF16 * part, BF16 * BUCKET]
    divided = held(zero_3, "gradient")
    assert sum(divided.values()) == alive["bytes"].sum()
    assert all(divided[layer] for layer, _ in PARAMETERS)
