"""The torch that an engine pins, and the phases of engines and their trainers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fakedist.errors import SetupError
from fakedist.record.engines import see_that_torch_fits, watched_engines
from fakedist.record.named_phases import NamedPhases
from fakedist.record.position import Position
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import NamedPhaseRecord


def install(site: Path, name: str, requirement: str) -> None:
    info = site / f"{name}-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\nRequires-Dist: {requirement}\n")
    (site / name).mkdir()
    (site / name / "__init__.py").write_text("loaded = True\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("vllm", "trl"):
            del sys.modules[name]


def phases_to(records: list[Record]) -> NamedPhases:
    return NamedPhases(records.append, Position(), None)


def test_an_engine_that_pins_another_torch_is_refused_before_its_code_runs(site: Path) -> None:
    install(site, "vllm", "torch==1.0.1")
    with (
        watched_engines(phases_to([])),
        pytest.raises(SetupError, match=r"is installed, and vllm 9.9 needs torch 1.0.1: pip install torch==1.0.1 "),
    ):
        __import__("vllm")
    assert "vllm" not in sys.modules


@pytest.mark.parametrize(
    "requirement",
    [
        f"torch=={version('torch').partition('+')[0]}",
        f"torch (=={version('torch').partition('+')[0]})",
        "torch>=1.0",
        "torchvision==0.1",
        "torch==1.0 ; extra == 'old'",
    ],
)
def test_an_engine_that_pins_this_torch_or_none_is_imported(site: Path, requirement: str) -> None:
    install(site, "vllm", requirement)
    with watched_engines(phases_to([])):
        assert __import__("vllm").loaded


def test_an_engine_without_a_distribution_is_not_checked() -> None:
    see_that_torch_fits("no-such-engine")


ENGINE = """
class LLM:
    def generate(self): return "answers"
    def sleep(self, level=1): return level
"""
TRAINER = """
class GRPOTrainer:
    def _get_per_token_logps_and_entropies(self): return "log-probs"
"""


def test_what_engines_and_trainers_do_is_recognised_unless_the_script_names_it(site: Path) -> None:
    install(site, "vllm", "torch")
    (site / "vllm/entrypoints").mkdir()
    (site / "vllm/entrypoints/llm.py").write_text(ENGINE)
    (site / "trl/trainer").mkdir(parents=True)
    (site / "trl/trainer/grpo_trainer.py").write_text(TRAINER)
    records: list[Record] = []
    phases = phases_to(records)
    with watched_engines(phases):
        engine = __import__("vllm.entrypoints.llm", fromlist=["LLM"]).LLM()  # which has no wake_up
        trainer = __import__("trl.trainer.grpo_trainer", fromlist=["GRPOTrainer"]).GRPOTrainer()
        assert engine.generate() == "answers"
        assert engine.sleep(level=2) == 2
        trainer._get_per_token_logps_and_entropies()  # a part of the loss
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies()
        with phases.of_script("generation"):
            engine.generate()
    engine.generate()
    names = [record.name for record in records if isinstance(record, NamedPhaseRecord)]
    assert names == ["rollout", "sleep", "log-probs", "generation"]


def test_a_phase_is_a_range_of_the_timed_step() -> None:
    class Ranges:
        seen: ClassVar[list[str | int]] = []

        def range_begins(self, name: str) -> int:
            self.seen.append(name)
            return 7

        def range_ended(self, number: int) -> None:
            self.seen.append(number)

    phases = NamedPhases([].append, Position(), None, Ranges())
    with pytest.raises(ValueError, match="no"), phases.named("rollout"):
        raise ValueError("no")
    assert Ranges.seen == ["rollout", 7]
    phases.close()
    with phases.named("later"):
        pass
    assert Ranges.seen == ["rollout", 7]
