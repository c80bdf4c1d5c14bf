from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.cost_model.collectives.collective_times import FABRICS
from fakedist.cost_model.hosts import HOSTS
from fakedist.errors import ExitCode
from fakedist.gpu.models.catalogue import GPUS
from tests.unit.results.test_repricing import STEP, priced_run

GPU_FILE = """
like = "h100-80g"
product = "NVIDIA H100 96GB HBM2e"
memory_gb_s = 2400
watts = 500
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return priced_run(tmp_path_factory.mktemp("priced") / "run", *STEP).path


def step_us(capsys: pytest.CaptureFixture[str], *arguments: str) -> float:
    assert main(["time", *arguments, "--json"]) == 0
    return float(json.loads(capsys.readouterr().out)["time"]["step_us"])


def test_a_slower_gpu_of_a_file_takes_longer(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GPU_FILE)
    own = step_us(capsys, str(run))
    assert step_us(capsys, str(run), "--gpu", "h200") < own < step_us(capsys, str(run), "--gpu", str(file))


def test_csv_has_the_table_that_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", str(run), "--gpu", "b200", "--format", "csv", "--table", "kernels"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert {"name", "duration_us", "shape"} <= set(head.split(","))
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu-power", "5"], "--gpu-power must be 10 to 10,000 watts, not 5"),
        (["--gpu-power", "warm"], "--gpu-power is a number of watts, not 'warm'"),
        (["--table", "kernels"], "--table is for --format csv"),
        (["--gpu", "b20"], "does not know the GPU 'b20'"),
    ],
)
def test_a_wrong_option_is_refused_and_no_gpu_is_guessed(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", str(run), *options]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert message in told
    assert ("h200, b200, gb200" in told) == ("--gpu" in options)
    assert "did you mean" not in told


def test_several_gpus_and_fabrics_make_one_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choice = ["--gpu", "h100", "--gpu", "b200", "--fabric", "dgx-h100-ndr,p5-efa"]
    assert main(["time", str(run), *choice]) == 0
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    pairs = [[gpu, fabric] for gpu in ("h100-80g", "b200") for fabric in ("dgx-h100-ndr", "p5-efa")]
    assert [row for row in shown if row in pairs] == pairs
    assert main(["time", str(run), *choice, "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)["priced"]
    assert [[row["gpu"], row["fabric"]] for row in priced] == pairs
    one = step_us(capsys, str(run), "--gpu", "b200", "--fabric", "p5-efa")
    assert priced[-1]["time"]["step_us"] == one
    assert main(["time", str(run), *choice, "--format", "csv"]) == ExitCode.USAGE


@pytest.mark.parametrize(("option", "known"), [("--gpu", GPUS), ("--fabric", FABRICS), ("--host", HOSTS)])
def test_list_prints_what_there_is(option: str, known: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("time", "profile"):
        assert main([command, option, "list"]) == 0
        first = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
        assert set(known) <= set(first)
