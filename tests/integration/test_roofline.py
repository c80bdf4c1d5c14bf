"""No operation takes less than its roofline, on any GPU; what is not known has no time and widens the step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

import fakedist
from fakedist.gpu.models.catalogue import GPUS
from fakedist.results.run import Run
from tests.accuracy.kernel_kinds import PAGE, Facts, arguments, kinds, operations
from tests.conftest import RunFakedist

MODELS = ("h100-80g", "a100-80g", "h200", "b200", "b300", "gb200", "l40s", "rtx4090", "rtx-pro-6000")


@dataclass(frozen=True)
class Recorded:
    """A run of the job, and what its operations must do at least."""

    run: Run
    facts: Facts
    is_whole: bool


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.nightly)])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_fakedist: RunFakedist
) -> Recorded:
    directory: Path = tmp_path_factory.mktemp("roofline")
    run_fakedist(*arguments(directory, *(["few"] if request.param == "few" else [])))
    facts = json.loads((directory / "facts.json").read_text())
    return Recorded(fakedist.open(directory / "run"), facts, request.param == "all")


@pytest.mark.parametrize("model", MODELS)
def test_no_operation_is_faster_than_its_roofline(recorded: Recorded, model: str) -> None:
    found = operations(recorded.run.priced_for(model), recorded.facts, GPUS[model])
    assert len(found) >= (250 if recorded.is_whole else 40)
    below = [
        (each.name, each.time_us, each.least_us)
        for each in found
        if (each.time_us if each.is_known else each.most_us) < 0.999 * each.least_us
    ]
    assert not below


def test_only_what_depends_on_a_value_is_not_known(recorded: Recorded) -> None:
    found = operations(recorded.run, recorded.facts, GPUS["h100-80g"])
    unknown = [each for each in found if not each.is_known]
    assert [each.name for each in unknown] == ["tl.dot up to a value"]
    most_us = float(unknown[0].kernels.loc[unknown[0].kernels["duration_us"].isna(), "high_us"].sum())
    assert recorded.run.summary.timed is not None
    source = recorded.run.summary.timed[1]
    assert source.step_us is not None
    assert source.step_high_us is not None
    assert source.step_high_us > source.step_us + most_us
    assert any("ended_by_a_value" in note.text for note in source.notes)


def test_a_triton_kernels_products_are_counted_whatever_its_sizes_are_called(recorded: Recorded) -> None:
    work = recorded.run.table("work")
    kernels = work[work["name"] == "product_kernel"]
    assert set(kernels["flops"]) == {2.0 * 4096**3}
    assert set(kernels["dtype"]) == {"bf16", "tf32"}, "tl.dot multiplies fp32 in TF32 by default"


def test_the_table_of_kinds_has_every_basis(recorded: Recorded) -> None:
    page = PAGE.read_text()
    found = kinds(operations(recorded.run, recorded.facts, GPUS["h100-80g"]))
    missing = [row.basis for row in found.itertuples() if f"| {row.state} | {row.basis}" not in page and row.basis]
    assert not missing, "make accuracy-kinds"
