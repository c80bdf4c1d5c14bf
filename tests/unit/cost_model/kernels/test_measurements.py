"""The published measurements in the package: complete, sane, and refused in one line when they are not.

Memory-bound kernels: the measured bandwidth of their kind, on the GPU that is asked for.

Products: the measured time on a measured shape, and something between its neighbours elsewhere.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakedist.cost_model.kernels.gpus import MEASURED_GPUS, product_roof
from fakedist.cost_model.kernels.measurements import (
    DATA,
    GroupedTimes,
    MovingTimes,
    ProductRoof,
    ProductSizes,
    ProductTable,
    ProductTimes,
    fill_gaps,
    interpolate,
    load_measured,
    measured_moves,
)
from fakedist.errors import SetupError
from fakedist.gpu.models.catalogue import GPUS


def test_every_table_belongs_to_a_gpu_model_and_names_its_sources() -> None:
    assert {path.stem for path in DATA.glob("*.npz")} == set(MEASURED_GPUS)
    for name in MEASURED_GPUS:
        origins = load_measured(name).origins
        assert {"products.bf16", "attention.forward"} <= set(origins)
        assert all(origins.values())


def test_times_are_those_of_a_gpu() -> None:
    table = load_measured("h100-sxm").products["bf16"]
    m, n, k, times = table.rows()
    rate = 2.0 * m * n * k / (times * 1e-6)
    assert len(times) > 35_000
    assert rate.max() < 989.4e12, "nothing is faster than the peak"
    large = (m >= 4096) & (n >= 4096) & (k >= 4096)
    assert 0.65 < np.median(rate[large]) / 989.4e12 < 0.85


def test_a_missing_table_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="missing") as found:
        load_measured("h100-sxm", tmp_path)
    assert "make measured" in found.value.hint


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_truncated_table_says_what_to_type(tmp_path: Path, size: int) -> None:
    shutil.copy(DATA / "h100-sxm.npz", tmp_path)
    with (tmp_path / "h100-sxm.npz").open("r+b") as file:
        file.truncate(size)
    with pytest.raises(SetupError, match="damaged") as found:
        load_measured("h100-sxm", tmp_path)
    assert "make measured" in found.value.hint


H200 = GPUS["h200"].memory_bandwidth


@pytest.fixture(scope="module")
def times() -> MovingTimes:
    return MovingTimes([measured_moves(load_measured("h200-sxm"), GPUS["h200"])])


def bandwidth(times: MovingTimes, kind: str, moved: float, peak: float = H200) -> float:
    return float(moved / times.time_us(kind, np.array([moved]), peak)[0] / 1e-6 / peak)


def test_kernels_reach_what_was_published(times: MovingTimes) -> None:
    # cudnn-frontend, H200, RMSNorm of 8192 x 4096 in bf16, PyTorch eager: 3,114.8 GB/s forward, 1,761.7 GB/s backward.
    elements = 8192 * 4096
    assert bandwidth(times, "rms_norm.forward", elements * 4) == pytest.approx(3114.8e9 / H200, rel=0.1)
    assert bandwidth(times, "rms_norm.backward", elements * 6) == pytest.approx(1761.7e9 / H200, rel=0.1)
    assert 0.7 < bandwidth(times, "elementwise", 1e9) < 0.95
    wide, narrow = (bandwidth(times, f"rms_norm.forward{kind}", 6e7) for kind in ("", ".narrow"))
    assert narrow < wide / 3
    assert bandwidth(times, "elementwise", 3e7) <= bandwidth(times, "elementwise", 1e9)


def test_time_grows_with_bytes_from_the_kernels_start(times: MovingTimes) -> None:
    sizes = np.geomspace(1e3, 1e11, 400)
    for kind in times.kinds:
        assert (np.diff(times.time_us(kind, sizes, H200)) > -1e-9).all()
    assert (np.diff(times.time_us("elementwise", sizes[sizes > 1e7], H200)) > 0).all()
    small, smaller = (times.time_us("elementwise", np.array([size]), H200)[0] for size in (1e5, 1e4))
    assert 0.5 < smaller <= small < 30


def own_times(name: str) -> tuple[MovingTimes, float]:
    """The times of a table, and its GPU's bandwidth."""
    spec = GPUS[MEASURED_GPUS[name]]
    return MovingTimes([measured_moves(load_measured(name), spec)]), spec.memory_bandwidth


def test_a_norm_of_one_measured_size_has_a_start_and_grows_like_another_norm() -> None:
    """LayerNorm on GB200: 1,024 rows of 12,288 in bf16, eager, 31 us forward and 40 us backward (cudnn-frontend)."""
    gb200, bandwidth_ = own_times("gb200")
    rows = 1024 * 12288
    for direction, moved, published_us in (("forward", 4.0 * rows, 31.0), ("backward", 6.0 * rows, 40.0)):
        kind = f"layer_norm.{direction}"
        assert gb200.is_like_another(kind)
        assert not gb200.is_like_another(f"rms_norm.{direction}")
        assert gb200.time_us(kind, np.array([moved]), bandwidth_)[0] == pytest.approx(published_us, rel=0.05)
        assert gb200.time_us(kind, np.array([1024.0]), bandwidth_)[0] > 1.0
        sizes = np.geomspace(1e3, 1e11, 50)
        assert (gb200.time_us(kind, sizes, bandwidth_) >= sizes / bandwidth_ * 1e6).all()


@pytest.mark.parametrize("kind", ["layer_norm.forward", "layer_norm.backward"])
def test_a_layer_norm_of_256_mib_or_more_is_not_slower_on_blackwell_than_on_an_h100(kind: str) -> None:
    sizes = np.geomspace(256 << 20, 8 << 30, 30)
    (gb200, wide), (h100, narrow) = own_times("gb200"), own_times("h100-sxm")
    assert (gb200.time_us(kind, sizes, wide) < h100.time_us(kind, sizes, narrow)).all()


H100 = product_roof(GPUS["h100-80g"], "bf16")


@pytest.fixture(scope="module")
def table() -> ProductTable:
    return load_measured("h100-sxm").products["bf16"]


@pytest.fixture(scope="module")
def product_times(table: ProductTable) -> ProductTimes:
    return ProductTimes(table, H100)


def one(product_times: ProductTimes, m: int, n: int, k: int, roof: ProductRoof | None = None) -> float:
    return float(product_times.time_us(ProductSizes.of(np.array([m]), np.array([n]), np.array([k])), roof)[0])


def test_a_measured_shape_takes_what_was_measured(table: ProductTable, product_times: ProductTimes) -> None:
    m, n, k, measured = table.rows()
    assert product_times.time_us(ProductSizes.of(m, n, k)) == pytest.approx(measured, rel=1e-9)


def test_a_shape_that_was_not_measured_follows_its_neighbours(product_times: ProductTimes) -> None:
    below, above = one(product_times, 8192, 4096, 12288), one(product_times, 8192, 4096, 16384)
    assert below < one(product_times, 8192, 4096, 14336) < above
    assert one(product_times, 257, 4096, 4096) > 1.02 * one(product_times, 256, 4096, 4096)  # one row more than a tile
    # A wider vocabulary than was measured takes longer by its columns.
    assert one(product_times, 8192, 131072, 4096) == pytest.approx(2 * one(product_times, 8192, 65536, 4096), rel=0.02)


def test_bandwidth_and_bytes_count_where_memory_limits(product_times: ProductTimes) -> None:
    slow = ProductRoof(H100.sms, H100.peak_flops, H100.memory_bandwidth / 2)
    assert one(product_times, 16, 8192, 8192, slow) > 1.5 * one(product_times, 16, 8192, 8192)
    assert one(product_times, 8192, 8192, 8192, slow) == pytest.approx(one(product_times, 8192, 8192, 8192), rel=0.01)
    sizes = ProductSizes.of(*(np.array([size]) for size in (8192, 8192, 64)))
    moved = np.array([8192 * 8192 * 2.0 + 2 * 8192 * 64 * 2])
    usual, wide = (float(product_times.time_us(replace(sizes, moved_bytes=share * moved))[0]) for share in (1, 2))
    assert wide > 1.5 * usual


def test_how_far_a_shape_is_from_measured_ones_is_known(product_times: ProductTimes) -> None:
    sizes = ProductSizes.of(np.array([8192, 8192, 8192]), np.array([4096, 14336, 131072]), np.array([4096, 4096, 4096]))
    within, beyond = product_times.octaves_away(sizes)
    assert within == pytest.approx([0, np.log2(16384 / 14336), 0])
    assert beyond == pytest.approx([0, 0, 1])


def test_a_batch_takes_longer_than_one_of_it_and_less_than_each_alone(product_times: ProductTimes) -> None:
    one_of_it = ProductSizes.of(*(np.array([size]) for size in (512, 512, 512)))
    batch = replace(one_of_it, batch=np.array([64.0]))
    alone, together = (float(product_times.time_us(sizes)[0]) for sizes in (one_of_it, batch))
    assert alone < together < 64 * alone


def test_a_million_products_are_estimated_in_one_call(product_times: ProductTimes) -> None:
    rng = np.random.default_rng(0)
    m, n, k = (rng.integers(1, 70_000, 1_000_000) for _ in range(3))
    found = product_times.time_us(ProductSizes.of(m, n, k))
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
    product_times = GroupedTimes(load_measured("h100-sxm").experts, H100)
    rows, experts, hidden, inner = 32_768, 8, 4_096, 14_336
    layer = product_times.layer_us(*(np.array([size]) for size in (rows, experts, hidden, inner)))[0]
    assert 6.0 * rows * hidden * inner / layer / 1e6 == pytest.approx(806, rel=0.05)

    def grouped(rows: int, groups: int, n: int, k: int) -> float:
        sizes = (np.array([float(size)]) for size in (rows, groups, n, k))
        return float(product_times.estimate(*sizes, roof=H100)[0][0])

    parts = grouped(rows, experts, 2 * inner, hidden) + grouped(rows, experts, hidden, inner)
    assert parts == pytest.approx(layer, rel=0.25)
    assert grouped(8192, 128, 4096, 4096) > 1.3 * grouped(8192, 1, 4096, 4096)  # many small experts are slower
