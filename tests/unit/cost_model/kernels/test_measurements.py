"""The published measurements in the package: complete, sane, and refused in one line when they are not."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from fakedist.cost_model.kernels.gpus import MEASURED_GPUS
from fakedist.cost_model.kernels.measurements import DATA, load_measured, measured_names
from fakedist.errors import SetupError


def test_every_table_belongs_to_a_gpu_model_and_names_its_sources() -> None:
    assert set(measured_names()) == set(MEASURED_GPUS)
    for name in measured_names():
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
