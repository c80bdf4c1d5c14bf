"""Inference engines that the script imports: the torch that vLLM needs, phases, and what vLLM measured of the GPU."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

import torch

from fakedist.errors import SetupError
from fakedist.patch import imported_within, now_and_when_imported, patched
from fakedist.record.beyond_capacity import Capacity
from fakedist.record.named_phases import NamedPhases
from fakedist.rundir.records import EngineRecord

_PIN = re.compile(r"torch\s*\(?===?\s*([^\s,;)]+)")
#: Class, method and phase, by module: of vLLM 0.33.0, TRL 1.16.0 and verl 0.9.1.
_PHASES = {
    "vllm.entrypoints.llm": (("LLM", "generate", "rollout"), ("LLM", "sleep", "sleep"), ("LLM", "wake_up", "wake")),
    "trl.generation.vllm_generation": (("VLLMGeneration", "sync_weights", "weight sync"),),
    "trl.trainer.grpo_trainer": (("GRPOTrainer", "_get_per_token_logps_and_entropies", "log-probs"),),
    "verl.trainer.ppo.v1.replay_buffer": (("ReplayBuffer", "sample", "rollout"),),
    "verl.workers.rollout.vllm_rollout.vllm_async_server": (
        ("vLLMReplica", "sleep", "sleep"),
        ("vLLMReplica", "wake_up", "wake"),
    ),
    "verl.workers.engine_workers": (
        ("ActorRolloutRefWorker", "update_weights", "weight sync"),
        ("ActorRolloutRefWorker", "compute_log_prob", "log-probs"),
        ("ActorRolloutRefWorker", "compute_ref_log_prob", "log-probs"),
        ("ActorRolloutRefWorker", "update_actor", "training"),
    ),
}
_TRAINER = "trl.trainer.grpo_trainer"
_WORKER = "vllm.v1.worker.gpu_worker"
_SAVER = "torch_memory_saver.entrypoint"
#: Methods that compute with gradients, too, where they are part of the loss.
_ALSO_IN_TRAINING = {"_get_per_token_logps_and_entropies"}


def see_that_torch_fits(engine: str) -> None:
    """Compare the torch that a distribution pins with the one that is installed.

    Raises:
        SetupError: They differ.
    """
    try:
        requirements, version = metadata.requires(engine) or [], metadata.version(engine)
        has = metadata.version("torch")
    except metadata.PackageNotFoundError:  # imported from a source tree
        return
    pins = [pin[1] for requirement in requirements if (pin := _PIN.match(requirement)) and ";" not in requirement]
    for needs in pins:
        if has.partition("+")[0] != needs.partition("+")[0]:
            what = f"torch {has} is installed, and {engine} {version} needs torch {needs}"
            raise SetupError(f"{what}: pip install torch=={needs} in an environment of its own (see docs/rl.md)")


@contextmanager
def hooked(phases: NamedPhases, capacity: Capacity | None = None) -> Iterator[None]:
    """Check the torch of vLLM when it is imported, and record phases of what engines and their trainers do.

    An engine that wakes asks once for each piece of memory, so ``capacity`` decides at once whether to grant it.
    """

    @contextmanager
    def checked(module: ModuleType) -> Iterator[None]:
        see_that_torch_fits(module.__name__)
        yield

    with ExitStack() as stack:

        def watch(module: ModuleType) -> None:
            for owner_name, name, title in _PHASES[module.__name__]:
                owner = getattr(module, owner_name, None)
                if hasattr(owner, name):  # releases differ
                    inside = _in_phase(getattr(owner, name), title, phases)
                    stack.enter_context(patched(owner, name, inside))

        def watch_trainer(module: ModuleType) -> None:
            trainer: Any = getattr(module, "GRPOTrainer", None)
            training = _Training(phases)
            if hasattr(trainer, "training_step") and hasattr(trainer, "_prepare_inputs"):
                stack.enter_context(patched(trainer, "training_step", training.step(trainer.training_step)))
                stack.enter_context(patched(trainer, "_prepare_inputs", training.prepare(trainer._prepare_inputs)))

        def watch_worker(module: ModuleType) -> None:
            engine = _Engine(phases, capacity)
            for name in ("initialize_from_config", "compile_or_warm_up_model", "sleep", "wake_up"):
                if hasattr(module.Worker, name):
                    inside = getattr(engine, name)(getattr(module.Worker, name))
                    stack.enter_context(patched(module.Worker, name, inside))

        def watch_saver(module: ModuleType) -> None:
            saver: Any = module.TorchMemorySaver
            stack.enter_context(patched(saver, "pause", _paused(saver.pause, phases)))
            stack.enter_context(patched(saver, "resume", _resumed(saver.resume, phases)))

        stack.enter_context(imported_within("vllm".__eq__, checked))
        stack.enter_context(now_and_when_imported(_PHASES, watch))
        stack.enter_context(now_and_when_imported([_TRAINER], watch_trainer))
        stack.enter_context(now_and_when_imported([_WORKER], watch_worker))
        stack.enter_context(now_and_when_imported([_SAVER], watch_saver))
        yield


def _in_phase(original: Callable[..., Any], title: str, phases: NamedPhases) -> Callable[..., object]:
    only_without_gradients = getattr(original, "__name__", "") in _ALSO_IN_TRAINING

    def phase() -> AbstractContextManager[object]:
        is_none = phases.is_named or (only_without_gradients and torch.is_grad_enabled())
        return nullcontext() if is_none else phases.named(title)

    @functools.wraps(original)
    def inside(*args: object, **kwargs: object) -> object:
        with phase():
            return original(*args, **kwargs)

    @functools.wraps(original)
    async def awaited_inside(*args: object, **kwargs: object) -> object:
        with phase():
            return await original(*args, **kwargs)

    return awaited_inside if inspect.iscoroutinefunction(original) else inside


def _paused(original: Callable[..., object], phases: NamedPhases) -> Callable[..., object]:
    """``TorchMemorySaver.pause``, which SGLang's engine calls once for each tag."""

    @functools.wraps(original)
    def pause(saver: object, tag: str | None = None) -> object:
        with phases.engine_sleeps("all paused" if tag is None else f"{tag} paused"):
            return original(saver, tag)

    return pause


def _resumed(original: Callable[..., object], phases: NamedPhases) -> Callable[..., object]:
    @functools.wraps(original)
    def resume(saver: object, tag: str | None = None) -> object:
        with phases.engine_wakes():
            return original(saver, tag)

    return resume


class _Training:
    """The phase from where a ``training_step`` of TRL's trainer has its inputs, the rollout over, to its end."""

    def __init__(self, phases: NamedPhases) -> None:
        self._phases = phases
        self._open: ExitStack | None = None

    def step(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``training_step``, which prepares its inputs, then computes forward and backward."""

        @functools.wraps(original)
        def training_step(*args: object, **kwargs: object) -> object:
            with ExitStack() as self._open:
                try:
                    return original(*args, **kwargs)
                finally:
                    self._open = None

        return training_step

    def prepare(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``_prepare_inputs``, which generates; evaluation calls it outside of a training step."""

        @functools.wraps(original)
        def prepare_inputs(*args: object, **kwargs: object) -> object:
            inputs = original(*args, **kwargs)
            if self._open is not None and not self._phases.is_named:
                self._open.enter_context(self._phases.named("training"))
            return inputs

        return prepare_inputs


class _Engine:
    """Methods of vLLM's ``Worker``, with a record of what they do to the memory of the GPU."""

    def __init__(self, phases: NamedPhases, capacity: Capacity | None) -> None:
        self._phases, self._capacity = phases, capacity
        self._cache: Any = None  # vLLM's KVCacheConfig

    def initialize_from_config(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``initialize_from_config``, which takes the KV cache."""

        @functools.wraps(original)
        def initialize(worker: Any, kv_cache_config: Any, *args: object, **kwargs: object) -> object:
            self._cache = kv_cache_config
            with self._phases.engine_takes_cache():
                return original(worker, kv_cache_config, *args, **kwargs)

        return initialize

    def compile_or_warm_up_model(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``compile_or_warm_up_model``, which takes the memory of CUDA graphs. The engine is then ready."""

        @functools.wraps(original)
        def warm_up(worker: Any, *args: object, **kwargs: object) -> object:
            graphs: list[int] = []
            capture = getattr(worker.model_runner, "capture_model", None)
            if capture is None:
                return original(worker, *args, **kwargs)

            def capture_model() -> object:
                graphs.append(capture())
                return graphs[-1]

            with patched(worker.model_runner, "capture_model", capture_model):
                returned = original(worker, *args, **kwargs)
            if self._cache is not None and hasattr(worker, "peak_activation_memory"):  # not of a size set by hand
                self._phases.append(_engine_record(worker, self._cache, sum(graphs)))
            return returned

        return warm_up

    def sleep(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``sleep``, which gives back the KV cache."""

        @functools.wraps(original)
        def sleep(worker: Any, level: int = 1) -> object:
            with self._phases.engine_sleeps(f"level {level}"):
                returned = original(worker, level)
            self._phases.engine_has_no_cache()
            return returned

        return sleep

    def wake_up(self, original: Callable[..., object]) -> Callable[..., object]:
        """Wrap ``wake_up``, which takes the KV cache again, alone or with the rest of its memory."""

        @functools.wraps(original)
        def wake_up(worker: Any, tags: list[str] | None = None) -> object:
            takes_cache = tags is None or "kv_cache" in tags
            takes = self._phases.engine_takes_cache() if takes_cache else nullcontext()
            with self._phases.engine_wakes(), takes, self._asking_once():
                return original(worker, tags)

        return wake_up

    @contextmanager
    def _asking_once(self) -> Iterator[None]:
        if self._capacity is None:
            yield
            return
        self._capacity.asked_once(1)
        try:
            yield
        finally:
            self._capacity.asked_once(-1)


def _engine_record(worker: Any, cache: Any, graphs_bytes: int) -> EngineRecord:
    """Read what a worker of vLLM 0.33.0 measured (``vllm/v1/worker/gpu_worker.py``) and made of it."""
    vllm, envs = import_module("vllm"), import_module("vllm.envs")
    planning, builders = (import_module(f"vllm.v1.core.kv_cache_{name}") for name in ("planning", "config_builder"))
    job, wishes, model = worker.vllm_config, worker.cache_config, worker.model_config
    builder = builders.get_kv_cache_config_builder(job)
    estimate = worker.cudagraph_memory_estimate if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS else 0
    dtype = str(model.dtype).removeprefix("torch.") if wishes.cache_dtype == "auto" else str(wishes.cache_dtype)
    return EngineRecord(
        version=str(vllm.__version__),
        utilization=float(wishes.gpu_memory_utilization),
        total_bytes=int(worker.init_snapshot.total_memory),
        free_bytes=int(worker.init_snapshot.free_memory),
        requested_bytes=int(worker.requested_memory),
        weights_bytes=int(worker.model_runner.model_memory_usage),
        consumed_bytes=int(worker.total_consumed),
        activations_bytes=int(worker.peak_activation_memory - estimate),
        graphs_estimate_bytes=int(estimate),
        graphs_bytes=int(graphs_bytes),
        num_blocks=int(cache.num_blocks),
        block_bytes=int(planning._pool_bytes_per_block_from_builder(builder, job, cache.kv_cache_groups)),
        block_tokens=int(wishes.block_size),
        request_bytes=int(planning._max_memory_usage_bytes_from_groups(builder, job, cache.kv_cache_groups)),
        cache_dtype=dtype,
        enforce_eager=bool(model.enforce_eager),
        can_sleep=bool(model.enable_sleep_mode),
        max_model_len=int(model.max_model_len),
        model_config=json.dumps(model.hf_text_config.to_dict(), default=str),
        ranks=int(job.parallel_config.tensor_parallel_size),
        max_running=int(job.scheduler_config.max_num_seqs),
        step_tokens=int(job.scheduler_config.max_num_batched_tokens),
    )
