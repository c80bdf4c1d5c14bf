"""Products: the measured time on a measured shape, and something between its neighbours elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from fakedist.cost_model.kernels.gpus import product_roof
from fakedist.cost_model.kernels.measurements import (
    GroupedTimes,
    ProductRoof,
    ProductSizes,
    ProductTable,
    ProductTimes,
    fill_gaps,
    interpolate,
    load_measured,
)
from fakedist.gpu.models.catalogue import GPUS

H100 = product_roof(GPUS["h100-80g"], "bf16")


@pytest.fixture(scope="module")
def table() -> ProductTable:
    return load_measured("h100-sxm").products["bf16"]


@pytest.fixture(scope="module")
def times(table: ProductTable) -> ProductTimes:
    return ProductTimes(table, H100)


def one(times: ProductTimes, m: int, n: int, k: int, roof: ProductRoof | None = None) -> float:
    return float(times.time_us(ProductSizes.of(np.array([m]), np.array([n]), np.array([k])), roof)[0])


def test_a_measured_shape_takes_what_was_measured(table: ProductTable, times: ProductTimes) -> None:
    m, n, k, measured = table.rows()
    assert times.time_us(ProductSizes.of(m, n, k)) == pytest.approx(measured, rel=1e-9)


def test_a_shape_that_was_not_measured_follows_its_neighbours(times: ProductTimes) -> None:
    below, above = one(times, 8192, 4096, 12288), one(times, 8192, 4096, 16384)
    assert below < one(times, 8192, 4096, 14336) < above
    assert one(times, 257, 4096, 4096) > 1.02 * one(times, 256, 4096, 4096)  # one row more than a tile
    # A wider vocabulary than was measured takes longer by its columns.
    assert one(times, 8192, 131072, 4096) == pytest.approx(2 * one(times, 8192, 65536, 4096), rel=0.02)


def test_bandwidth_and_bytes_count_where_memory_limits(times: ProductTimes) -> None:
    slow = ProductRoof(H100.sms, H100.peak_flops, H100.memory_bandwidth / 2)
    assert one(times, 16, 8192, 8192, slow) > 1.5 * one(times, 16, 8192, 8192)
    assert one(times, 8192, 8192, 8192, slow) == pytest.approx(one(times, 8192, 8192, 8192), rel=0.01)
    sizes = ProductSizes.of(*(np.array([size]) for size in (8192, 8192, 64)))
    moved = np.array([8192 * 8192 * 2.0 + 2 * 8192 * 64 * 2])
    usual, wide = (float(times.time_us(replace(sizes, moved_bytes=share * moved))[0]) for share in (1, 2))
    assert wide > 1.5 * usual


def test_how_far_a_shape_is_from_measured_ones_is_known(times: ProductTimes) -> None:
    sizes = ProductSizes.of(np.array([8192, 8192, 8192]), np.array([4096, 14336, 131072]), np.array([4096, 4096, 4096]))
    within, beyond = times.octaves_away(sizes)
    assert within == pytest.approx([0, np.log2(16384 / 14336), 0])
    assert beyond == pytest.approx([0, 0, 1])


def test_a_batch_takes_longer_than_one_of_it_and_less_than_each_alone(times: ProductTimes) -> None:
    one_of_it = ProductSizes.of(*(np.array([size]) for size in (512, 512, 512)))
    batch = replace(one_of_it, batch=np.array([64.0]))
    alone, together = (float(times.time_us(sizes)[0]) for sizes in (one_of_it, batch))
    assert alone < together < 64 * alone


def test_a_million_products_are_estimated_in_one_call(times: ProductTimes) -> None:
    rng = np.random.default_rng(0)
    m, n, k = (rng.integers(1, 70_000, 1_000_000) for _ in range(3))
    found = times.time_us(ProductSizes.of(m, n, k))
    assert found.shape == (1_000_000,)
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_interpolation_is_exact_on_the_grid_and_linear_between_and_gaps_are_filled() -> None:
    axes = [np.array([0.0, 1.0, 3.0]), np.array([0.0, 2.0])]
    grid = np.array([[0.0, 2.0], [1.0, 3.0], [5.0, 7.0]])
    found = interpolate(axes, grid, [np.array([0.0, 1.0, 2.0, 9.0]), np.array([0.0, 2.0, 1.0, -1.0])])
    assert found == pytest.approx([0.0, 3.0, 4.0, 5.0])
    nan = np.nan  # gaps take their nearest neighbour along the first axis
    assert fill_gaps(np.array([[1.0, nan], [nan, 4.0], [3.0, nan]])).tolist() == [[1.0, 4.0], [1.0, 4.0], [3.0, 4.0]]


def test_a_layer_of_experts_takes_what_was_published_and_its_two_products_about_as_long() -> None:
    # TensorRT-LLM's collector on an H100, Mixtral's experts, 16,384 tokens to 2 of 8 experts: 806 TFLOP/s.
    times = GroupedTimes(load_measured("h100-sxm").experts, H100)
    rows, experts, hidden, inner = 32_768, 8, 4_096, 14_336
    layer = times.layer_us(*(np.array([size]) for size in (rows, experts, hidden, inner)))[0]
    assert 6.0 * rows * hidden * inner / layer / 1e6 == pytest.approx(806, rel=0.05)

    def grouped(rows: int, groups: int, n: int, k: int) -> float:
        sizes = (np.array([float(size)]) for size in (rows, groups, n, k))
        return float(times.estimate(*sizes, roof=H100)[0][0])

    parts = grouped(rows, experts, 2 * inner, hidden) + grouped(rows, experts, hidden, inner)
    assert parts == pytest.approx(layer, rel=0.25)
    assert grouped(8192, 128, 4096, 4096) > 1.3 * grouped(8192, 1, 4096, 4096)  # many small experts are slower
