"""Memory-bound kernels: the measured bandwidth of their kind, on the GPU that is asked for."""

import numpy as np
import pytest

from fakedist.cost_model.kernels.gpus import MEASURED_GPUS
from fakedist.cost_model.kernels.measurements import MovingTimes, load_measured, measured_moves
from fakedist.gpu.models.catalogue import GPUS

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
