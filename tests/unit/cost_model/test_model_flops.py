"""The model's FLOPs of steps written by hand."""

from typing import Any

import pytest

from fakedist.cost_model.model_flops import ModelFlops, flops_of_kernels, flops_of_launches
from fakedist.rundir.launch_records import WorkRow
from tests.unit.cost_model.job.test_job_times import ATTENTION, tables
from tests.unit.cost_model.launches_by_hand import COPY, PRODUCT, launch

ONE = PRODUCT.flops


def counted(*rows: dict[str, Any]) -> float:
    found, by_kernel = flops_of_launches(*tables(*rows)), flops_of_kernels(kernels(*rows))
    assert found == by_kernel
    return found.flops


def kernels(*rows: dict[str, Any]) -> Any:
    launches, work = tables(*rows)
    of_work = work.iloc[launches["work"].to_numpy()].reset_index(drop=True)
    return launches.assign(family=of_work["family"], flops=of_work["flops"])


def test_a_products_forward_and_backward_count_and_nothing_else_does() -> None:
    training = [launch(PRODUCT), launch(PRODUCT, phase="backward"), launch(PRODUCT, phase="backward")]
    others = [
        launch(PRODUCT, phase="backward", recompute=True),
        launch(PRODUCT, phase="optimizer"),
        launch(PRODUCT, phase="other"),  # an evaluation, or an optimizer that is none of torch's
        launch(COPY._replace(flops=1e9)),
    ]
    assert counted(*training) == counted(*others, *training, *others) == 3 * ONE


def test_functions_without_a_module_count_up_to_their_backward() -> None:
    step = [launch(PRODUCT, phase=phase) for phase in ("other", "backward", "other", "backward")]
    assert counted(*step) == 4 * ONE
    assert counted(*step, launch(PRODUCT, phase="other")) == 4 * ONE  # a hand-written optimizer
    assert counted(launch(PRODUCT, phase="other"), launch(PRODUCT, phase="generation")) == 2 * ONE


@pytest.mark.parametrize(("width", "value_width", "fused"), [(64, 64, 5), (192, 128, 5 * 832 / 5 / 160)])
def test_the_scores_of_a_fused_attention_count_once(width: int, value_width: int, fused: float) -> None:
    forward = ATTENTION._replace(width=width, value_width=value_width, flops=1.0 * (width + value_width))
    backward = forward._replace(attention="backward", flops=1.0 * (3 * width + 2 * value_width))
    found = flops_of_launches(*tables(launch(forward), launch(backward, phase="backward")))
    assert found.flops == pytest.approx(3 * forward.flops)
    assert fused * (width + value_width) / 2 == pytest.approx(backward.flops)


def test_products_of_the_model_without_flops_are_counted() -> None:
    unknown = WorkRow("gemm", "kernel", "gemm", "library.gemm", float("nan"), 0.0)
    rows = [launch(PRODUCT), launch(unknown), launch(unknown, phase="optimizer"), launch(COPY._replace(flops=1.0))]
    assert flops_of_launches(*tables(*rows)) == ModelFlops(ONE, 1)
