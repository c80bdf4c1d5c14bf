"""Memory-bound kernels: the measured bandwidth of their kind, on the GPU that is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from fakedist.gpu_models.known import GPUS
from fakedist.time.gpus import MEASURED_GPUS, measured_spec
from fakedist.time.moving import MovingTimes, nearest_moves

BANDWIDTHS = {name: measured_spec(name).memory_bandwidth for name in MEASURED_GPUS}
H200 = GPUS["h200"].memory_bandwidth


@pytest.fixture(scope="module")
def times() -> MovingTimes:
    return MovingTimes(nearest_moves("h200-sxm", BANDWIDTHS))


def bandwidth(times: MovingTimes, kind: str, moved: float, peak: float = H200) -> float:
    return float(moved / times.time_us(kind, np.array([moved]), peak)[0] / 1e-6 / peak)


def test_an_eager_norm_reaches_what_was_published(times: MovingTimes) -> None:
    # cudnn-frontend, H200, RMSNorm of 8192 x 4096 in bf16, PyTorch eager: 3,114.8 GB/s forward, 1,761.7 GB/s backward.
    elements = 8192 * 4096
    assert bandwidth(times, "rms_norm.forward", elements * 4) == pytest.approx(3114.8e9 / H200, rel=0.1)
    assert bandwidth(times, "rms_norm.backward", elements * 6) == pytest.approx(1761.7e9 / H200, rel=0.1)


def test_elementwise_kernels_of_a_gpu_without_measurements_reach_those_of_another(times: MovingTimes) -> None:
    assert 0.7 < bandwidth(times, "elementwise", 1e9) < 0.95


def test_a_small_kernel_takes_its_start(times: MovingTimes) -> None:
    small, smaller = (times.time_us("elementwise", np.array([size]), H200)[0] for size in (1e5, 1e4))
    assert 0.5 < smaller <= small < 30


def test_time_grows_with_bytes(times: MovingTimes) -> None:
    sizes = np.geomspace(1e3, 1e11, 400)
    for kind in ("elementwise",):
        assert (np.diff(times.time_us(kind, sizes, H200)) > 0).all()
