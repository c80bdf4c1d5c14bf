from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import ExitCode
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
