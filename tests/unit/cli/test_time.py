from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.cost_model.collectives.fabric import FABRICS
from fakedist.cost_model.hosts import HOSTS
from fakedist.errors import ExitCode
from fakedist.gpu.models.catalogue import GPUS
from fakedist.rundir.summary import EngineMemory
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


ENGINE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_an_engine_adds_its_rollout(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ENGINE))
    asked = [
        "--engine",
        str(config),
        "--lengths",
        "100",
        "--requests",
        "4",
        "--prompt-tokens",
        "9",
        "--kv-tokens",
        "999",
    ]
    assert main(["time", str(run), *asked, "--json"]) == 0
    rollout = json.loads(capsys.readouterr().out)["rollout"]
    assert (rollout["num_steps"], rollout["generated_tokens"], rollout["most_decoding"]) == (100, 400, 4)
    assert rollout["tokens_per_s"] == pytest.approx(400 / rollout["time_us"] * 1e6)
    assert main(["time", str(run), *asked, "--host", "20", "--gpu", "h200", "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)["rollout"]
    assert slow["time_us"] > 3 * rollout["time_us"]
    assert {part["name"] for part in slow["parts"]} - {part["name"] for part in rollout["parts"]} <= {"host"}
    for form in ("text", "markdown"):
        assert main(["time", str(run), *asked, "--format", form]) == 0
        shown = capsys.readouterr().out
        assert "Rollout of one engine" in shown
        assert "400 tokens" in shown


def test_the_rollout_is_of_the_runs_own_engine(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--lengths", "100", "--requests", "40", "--prompt-tokens", "9", "--json"]
    assert main(["time", str(run), *asked]) == ExitCode.USAGE
    assert "the run has no engine of vLLM\n  --engine llama/config.json --kv-tokens 4" in capsys.readouterr().err
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    manifest = json.loads((copy / "run.json").read_text())
    texts = ("process", "version", "cache_dtype", "peak_phase", "unknown_because")
    own = dict.fromkeys((field.name for field in dataclasses.fields(EngineMemory)), 0) | dict.fromkeys(texts, "")
    own |= {"enforce_eager": False, "can_sleep": True, "model_config": json.dumps(ENGINE), "ranks": 2}
    own |= {"num_blocks": 200, "block_tokens": 16, "max_running": 32, "step_tokens": 512}
    manifest["summary"]["engine"] = own
    (copy / "run.json").write_text(json.dumps(manifest))
    assert main(["time", str(copy), *asked]) == 0
    found = json.loads(capsys.readouterr().out)["rollout"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ENGINE))
    same = ["--engine", str(config), "--kv-tokens", "3200", "--engine-tp", "2", "--max-running", "32"]
    assert main(["time", str(run), *asked, *same, "--step-tokens", "512"]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"] == found
    assert (found["ranks"], found["most_decoding"]) == (2, 32)
    assert found["num_given_back"] > 0, "no more than 29 fit to their end"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "x.json"], "--engine was given without --lengths, which a rollout needs"),
        (["--lengths", "5", "--engine", "x.json", "--kv-tokens", "9"], "without --prompt-tokens"),
        (["--lengths", "5", "--engine", "x.json", "--prompt-tokens", "9"], "without --kv-tokens"),
        (["--requests", "0"], "--requests must be 1 or more, not 0"),
    ],
)
def test_an_engine_lacks_nothing(
    run: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["time", str(run), *options]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_an_engine_is_for_one_run_and_gpu(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--engine", "x", "--lengths", "1", "--requests", "1", "--prompt-tokens", "1", "--kv-tokens", "9"]
    for more in ([str(run)], ["--gpu", "h100,b200"], ["--format", "csv"]):
        assert main(["time", str(run), *more, *asked]) == ExitCode.USAGE
        assert "a rollout is for one run, GPU and fabric" in capsys.readouterr().err
