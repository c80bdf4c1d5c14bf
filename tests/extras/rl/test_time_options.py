"""``fakedist time`` adds the rollout of an engine to the step of a run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from fakedist.cli import main
from fakedist.errors import ExitCode
from fakedist.rundir.summary import EngineMemory
from tests.unit.cli.test_time import run

__all__ = ["run"]  # a fixture

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
