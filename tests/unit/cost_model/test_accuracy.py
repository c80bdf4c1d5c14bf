"""The published accuracy is that of the tables in the package, and holds what is promised."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakedist.cost_model.accuracy import accuracy_rows, closest
from fakedist.cost_model.kernels.measurements import DATA, load_measured
from fakedist.errors import SetupError
from fakedist.gpu.models.catalogue import find_gpu
from tests.support.bench import ROOT, bench_module

FOUND: list[dict[str, Any]] = json.loads((DATA / "accuracy.json").read_text())


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return bench_module("accuracy_times")


def of(gpu: str, family: str) -> dict[str, Any]:
    return next(each for each in FOUND if each["gpu"] == gpu and each["family"] == family)


@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm", "gb200", "gb300"])
def test_bf16_products_are_within_3_percent_at_the_median_and_12_at_the_95th(gpu: str) -> None:
    assert of(gpu, "products bf16")["median"] <= 0.03
    assert of(gpu, "products bf16")["p95"] <= 0.12
    assert of(gpu, "products bf16, wide")["p95"] <= 0.20


@pytest.mark.parametrize(
    "family",
    [
        "attention forward",
        "attention training forward",
        "attention training backward",
        "norms",
        "elementwise",
        "elementwise, other kernels",
    ],
)
def test_other_families_are_within_8_percent_at_the_median(family: str) -> None:
    medians = [each["median"] for each in FOUND if each["family"] == family]
    assert medians
    assert max(medians) <= 0.08


def test_intervals_hold_what_they_promise_and_the_page_shows_every_result() -> None:
    large = [each for each in FOUND if each["kernels"] >= 100]
    assert large
    assert [(each["gpu"], each["family"]) for each in large if not 0.84 <= each["inside"] <= 0.95] == []
    page = (ROOT / "docs" / "accuracy" / "results.md").read_text()
    missing = [each for each in FOUND if f"| {each['gpu']} | {each['family']} | {each['kernels']:,} |" not in page]
    assert missing == []


def test_the_published_figures_are_those_of_the_tables(judge: ModuleType) -> None:
    table = load_measured("h100-sxm").products["bf16"]
    products = judge.products("products bf16", "h100-sxm", table, "bf16")
    assert [each.median for each in products] == pytest.approx(
        [of("h100-sxm", name)["median"] for name in ("products bf16", "products bf16, wide")]
    )
    attention = judge.closeness("attention forward", "h100-sxm", judge.inference_attention("h100-sxm"))
    assert attention.median == pytest.approx(of("h100-sxm", "attention forward")["median"])


def test_a_job_gets_the_rows_of_its_gpu_or_of_the_one_it_is_like() -> None:
    found = closest(find_gpu("h200"), ["products bf16", "norms", "products bf16"])
    assert [(row.gpu, row.family) for row in found] == [("h200-sxm", "products bf16"), ("h200-sxm", "norms")]
    assert [row.gpu for row in closest(find_gpu("rtx4090"), ["products bf16"])] == ["l40s"]
    assert [row.family for row in closest(find_gpu("a100"), ["norms"])] == ["norms"]  # measured elsewhere
    assert closest(find_gpu("a100"), ["no such family"]) == []


@pytest.mark.parametrize("text", [None, "", "[", "{}", '[{"family": "x"}]', "[1]"])
def test_a_missing_or_damaged_file_names_the_command(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "accuracy.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SetupError, match="missing" if text is None else "damaged") as caught:
        accuracy_rows(path)
    assert "make accuracy-times" in caught.value.hint
