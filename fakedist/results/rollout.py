"""The rollout of an inference engine on a run's GPU: simulated by continuous batching, and priced."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from fakedist.cost_model.collectives.collective_times import CollectiveTimes
from fakedist.cost_model.estimated import Models
from fakedist.cost_model.hosts import default_host, find_host
from fakedist.cost_model.nccl.settings import read_settings
from fakedist.cost_model.rollout.lengths import request_lengths
from fakedist.cost_model.rollout.model_config import read_model_config
from fakedist.cost_model.rollout.rollout_time import EngineModels, RolloutTime, price_rollout, relative_host
from fakedist.cost_model.rollout.schedule import EngineLimits
from fakedist.gpu.models.spec import GpuSpec
from fakedist.options.pricing import Pricing, PricingOptions
from fakedist.options.rollout import Rollout
from fakedist.results.repricing import models_of
from fakedist.results.run import Run
from fakedist.units import GIB

#: vLLM 0.33.0's defaults for ``LLM`` (``EngineArgs.get_batch_defaults``): requests and tokens of a step, by memory.
_LARGE_BYTES, _LARGE, _SMALL = 70 * GIB, (1024, 16384), (256, 8192)


def time_rollout(run: Run, rollout: Rollout, gpu: str | None = None, **options: Unpack[PricingOptions]) -> RolloutTime:
    """Price a rollout on GPUs such as a run's, or others; the run's own steps do not matter.

    Args:
        run: A run of the trainer.
        rollout: With an engine, lengths, prompts' tokens and those of the KV cache.
        gpu: A known GPU model, such as "b200", or a GPU file; None for the run's own.
        options: See :class:`fakedist.options.pricing.Pricing`.

    Raises:
        SetupError: The calibration table cannot be read, or is of another GPU.
        JobError: There is no such GPU, fabric or host, the model's configuration or the lengths cannot be read, or the
            engine cannot answer such requests.
        RunDirectoryError: The run's own GPU model is not known.
    """
    models = models_of(Pricing(gpu, **options), run.manifest, run.summary)
    assert rollout.engine is not None
    assert rollout.lengths is not None
    assert rollout.prompt_tokens is not None
    assert rollout.kv_tokens is not None
    model = read_model_config(Path(rollout.engine))
    draws = request_lengths(rollout.lengths, rollout.requests)
    max_running, step_tokens = _defaults(models.gpu)
    limits = EngineLimits(rollout.kv_tokens, rollout.max_running or max_running, rollout.step_tokens or step_tokens)
    collectives = CollectiveTimes(models.gpu, models.network.fabric, nccl=read_settings(models.network.nccl))
    engine = EngineModels(models.gpu, models.prices, collectives, _host(models))
    return price_rollout(model, draws, rollout.prompt_tokens, limits, rollout.engine_tp, engine)


def _defaults(gpu: GpuSpec) -> tuple[int, int]:
    return _LARGE if gpu.memory_bytes >= _LARGE_BYTES and "A100" not in gpu.product else _SMALL


def _host(models: Models) -> float:
    chosen, time = models.host.chosen, models.host.time
    spec = default_host(models.gpu.like or models.gpu.name) if chosen is None else find_host(chosen, time.machine_us)
    return relative_host(spec.dispatch_us)
