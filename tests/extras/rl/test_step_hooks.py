"""The torch that an engine pins, and the phases of engines and their trainers."""

from __future__ import annotations

import asyncio
import inspect
import sys
from array import array
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch

from fakedist.errors import SetupError
from fakedist.extras.rl.step_hooks import hooked, see_that_torch_fits
from fakedist.record.beyond_capacity import Capacity
from fakedist.record.named_phases import NamedPhases
from fakedist.record.position import Position
from fakedist.rundir.encoding import Record
from fakedist.rundir.records import (
    AsleepRecord,
    EngineCacheRecord,
    EngineSleepRecord,
    EngineUseRecord,
    NamedPhaseRecord,
)


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
        if name.partition(".")[0] in ("vllm", "trl", "torch_memory_saver"):
            del sys.modules[name]


def phases_to(records: list[Record]) -> NamedPhases:
    return NamedPhases(records.append, Position(), None)


def test_an_engine_that_pins_another_torch_is_refused_before_its_code_runs(site: Path) -> None:
    install(site, "vllm", "torch==1.0.1")
    with (
        hooked(phases_to([])),
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
    with hooked(phases_to([])):
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
    def training_step(self, engine):
        self._prepare_inputs(engine)
        self._get_per_token_logps_and_entropies()
        return "loss"
    def _prepare_inputs(self, engine): return engine.generate()
    def _get_per_token_logps_and_entropies(self): return "log-probs"
"""


def test_what_engines_and_trainers_do_is_recognised_unless_the_script_names_it(site: Path) -> None:
    install(site, "vllm", "torch")
    (site / "vllm/entrypoints").mkdir()
    (site / "vllm/entrypoints/llm.py").write_text(ENGINE)
    install(site, "trl", "torch")  # before one that is installed in truth
    (site / "trl/trainer").mkdir()
    (site / "trl/trainer/grpo_trainer.py").write_text(TRAINER)
    records: list[Record] = []
    phases = phases_to(records)
    with hooked(phases):
        engine = __import__("vllm.entrypoints.llm", fromlist=["LLM"]).LLM()  # which has no wake_up
        trainer = __import__("trl.trainer.grpo_trainer", fromlist=["GRPOTrainer"]).GRPOTrainer()
        assert engine.generate() == "answers"
        assert engine.sleep(level=2) == 2
        trainer._get_per_token_logps_and_entropies()  # a part of the loss
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies()
        trainer._prepare_inputs(engine)  # to evaluate
        assert trainer.training_step(engine) == "loss"
        with phases.of_script("generation"):
            engine.generate()
        with phases.of_script("step"):
            trainer.training_step(engine)
    trainer.training_step(engine)
    names = [record.name for record in records if isinstance(record, NamedPhaseRecord)]
    assert names == [
        *("rollout", "sleep", "log-probs", "rollout", "rollout", "training"),
        *("generation", "step"),
    ]


VERL_WORKER = """
class ActorRolloutRefWorker:
    async def update_weights(self, global_steps): return global_steps
    def update_actor(self, data): return data
"""


def test_a_phase_lasts_as_long_as_what_a_worker_awaits(site: Path) -> None:
    (site / "verl/workers").mkdir(parents=True)
    (site / "verl/workers/engine_workers.py").write_text(VERL_WORKER)
    records: list[Record] = []
    with hooked(phases_to(records)):
        module = __import__("verl.workers.engine_workers", fromlist=["ActorRolloutRefWorker"])
        worker = module.ActorRolloutRefWorker()
        assert inspect.iscoroutinefunction(worker.update_weights), "verl asks whether it is one"
        synced = worker.update_weights(3)
        assert not records
        assert asyncio.run(synced) == 3
        assert worker.update_actor("data") == "data"
    names = [record.name for record in records if isinstance(record, NamedPhaseRecord)]
    assert names == ["weight sync", "training"]


WORKER = """
class Runner:
    def capture_model(self): return 7
class Worker:
    model_runner = Runner()
    def initialize_from_config(self, config): return config
    def compile_or_warm_up_model(self): return self.model_runner.capture_model()
    def sleep(self, level=1): pass
    def wake_up(self, tags=None): pass
"""


def test_an_engine_that_wakes_asks_once_for_its_memory(site: Path) -> None:
    class Memory:
        asked: ClassVar[list[int]] = []

        def asked_once(self, more: int) -> None:
            self.asked.append(more)

    install(site, "vllm", "torch")
    (site / "vllm/v1/worker").mkdir(parents=True)
    (site / "vllm/v1/worker/gpu_worker.py").write_text(
        WORKER.replace("tags=None): pass", "tags=None): raise MemoryError")
    )
    with hooked(phases_to([]), cast(Capacity, Memory())):
        worker = __import__("vllm.v1.worker.gpu_worker", fromlist=["Worker"]).Worker()
        worker.sleep()
        assert Memory.asked == []
        with pytest.raises(MemoryError):
            worker.wake_up()
    assert Memory.asked == [1, -1]


class Device:
    """Of which 5 bytes are used at each time. It says when an engine had its KV cache."""

    def __init__(self) -> None:
        self.is_awake: list[bool] = []
        self.used = 5

    def in_use(self) -> tuple[int, int, int, int, int]:
        return 10, 95, self.used, 0, 0

    def kept(self) -> tuple[dict[str, int], list[tuple[int, int]]]:
        return {"tensors": self.used}, [(4096, 512), (8192, 1024)][: 3 - len(self.is_awake)]

    def num_changes(self) -> int:
        return 10 * len(self.is_awake)

    def engine(self, *, is_awake: bool) -> None:
        self.is_awake.append(is_awake)

    def most_of_engine(self) -> tuple[int, int]:
        return 40, 95


def test_when_the_engine_has_its_cache_and_what_it_keeps_asleep_is_recorded(site: Path) -> None:
    install(site, "vllm", "torch")
    (site / "vllm/v1/worker").mkdir(parents=True)
    (site / "vllm/v1/worker/gpu_worker.py").write_text(WORKER)
    records: list[Record] = []
    device = Device()
    phases = NamedPhases(records.append, Position(), device)
    with hooked(phases):
        worker = __import__("vllm.v1.worker.gpu_worker", fromlist=["Worker"]).Worker()
        worker.initialize_from_config("cache")
        assert worker.compile_or_warm_up_model() == 7, "not measured: its size was set by hand"
        with phases.named("rest"):
            worker.sleep(level=2)
            worker.wake_up(tags=["weights"])
            assert device.is_awake == [True, False]
            worker.wake_up(tags=["kv_cache"])
        phases.close()
    assert device.is_awake == [True, False, True]
    (named,) = (record for record in records if isinstance(record, NamedPhaseRecord))
    assert (named.peak_asleep_bytes, named.peak_awake_bytes, named.peak_used_bytes) == (10, 95, 95)
    assert [record for record in records if isinstance(record, EngineUseRecord)] == [EngineUseRecord(40, 95)]
    caches = [record for record in records if isinstance(record, EngineCacheRecord)]
    known = [(each.first_change, each.end_change) for each in caches]
    assert known == [(10, -1), (10, 21), (30, -1), (30, 31)], "and the end of each once it is known"
    (slept,) = (record for record in records if isinstance(record, EngineSleepRecord))
    assert slept == EngineSleepRecord("level 2", 0, {"tensors": 5})
    asleep = [list(memoryview(record.address).cast("Q")) for record in records if isinstance(record, AsleepRecord)]
    assert asleep == [[4096, 8192], [4096], []], "asleep; its weights awake; all"


SAVER = """
class TorchMemorySaver:
    def __init__(self, device): self.device = device
    def pause(self, tag=None): self.device.used -= 3
    def resume(self, tag=None): self.device.used += 3
"""


def test_what_torch_memory_saver_pauses_sleeps(site: Path) -> None:
    (site / "torch_memory_saver").mkdir()
    (site / "torch_memory_saver/__init__.py").touch()
    (site / "torch_memory_saver/entrypoint.py").write_text(SAVER)
    records: list[Record] = []
    device = Device()
    with hooked(NamedPhases(records.append, Position(), device)):
        module = __import__("torch_memory_saver.entrypoint", fromlist=["TorchMemorySaver"])
        module.TorchMemorySaver(device).pause("kv_cache")
        module.TorchMemorySaver(device).resume("kv_cache")
    sizes = array("Q", [512, 1024]).tobytes()
    asleep = AsleepRecord(0, array("Q", [4096, 8192]).tobytes(), sizes)
    assert records == [asleep, EngineSleepRecord("kv_cache paused", 3, {"tensors": 2}), asleep]


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
