"""Shares of the GPU that vLLM's engine may take: the least that starts it, the largest with which all phases fit.

It repeats what vLLM 0.33.0 computes from what its profiling run measured: ``request_memory`` of
``vllm/v1/worker/utils.py``, ``Worker.determine_available_memory`` of ``vllm/v1/worker/gpu_worker.py``, and
``get_kv_cache_configs`` of ``vllm/v1/core/kv_cache_planning.py``. What it measured does not depend on the share.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields

import pandas as pd

from fakedist.analysis.memory_tables import cache_bytes
from fakedist.analysis.recording import Recording
from fakedist.rundir.outcome import Ending
from fakedist.rundir.records import EngineRecord
from fakedist.rundir.summary import Advice, EngineMemory, EngineSettings, EngineSleep, Outside
from fakedist.units import format_bytes

#: Shares are multiples of one ten-thousandth, which is 8 MiB of an H100.
_SHARES = 10_000
_MIN_GAIN = 0.005  # of the GPU: a share that is closer to the largest is as good
_OF_TWO_BYTES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Use:
    """The most that was in use of the GPU without the KV cache and with it, in bytes."""

    asleep_bytes: int
    awake_bytes: int


def num_blocks(engine: EngineRecord, share: float) -> int:
    """Blocks of the KV cache that the engine has with a ``gpu_memory_utilization``; below 0 if it lacks memory."""
    return _available(engine, share) // engine.block_bytes


def starts(engine: EngineRecord, share: float) -> bool:
    """Whether one request has room in the KV cache, in addition to the block that vLLM holds back."""
    return _available(engine, share) - engine.block_bytes >= max(engine.request_bytes, 1)


def fits(engine: EngineRecord, use: Use, share: float, more_bytes: int = 0) -> bool:
    """Whether the GPU has the memory that the engine asks for at its start, and what is in use later.

    Args:
        more_bytes: Memory of the GPU that is taken and not counted in ``use``.
    """
    growth = cache_bytes(engine, num_blocks(engine, share)) - cache_bytes(engine, engine.num_blocks)
    room = engine.total_bytes - more_bytes
    at_start = _requested(engine, share) <= engine.free_bytes - more_bytes
    return at_start and use.awake_bytes + growth <= room and use.asleep_bytes <= room


def least_share(engine: EngineRecord) -> float | None:
    """The least share with which the engine starts; None if it does with none."""
    at = bisect.bisect_left(range(1, _SHARES + 1), 1, key=lambda number: starts(engine, number / _SHARES)) + 1
    return at / _SHARES if at <= _SHARES else None


def largest_share(engine: EngineRecord, use: Use, more_bytes: int = 0) -> float | None:
    """The largest share with which all fits; None if that is less than what the engine needs to start."""

    def lacks_room(number: int) -> bool:
        return not fits(engine, use, number / _SHARES, more_bytes)

    at, least = bisect.bisect_left(range(1, _SHARES + 1), 1, key=lacks_room), least_share(engine)
    return None if least is None or at / _SHARES < least else at / _SHARES


def engine_memory(recording: Recording, ending: Ending, outside: Outside | None) -> EngineMemory | None:
    """Return what vLLM's engine of a run holds, and its shares; None without one."""
    if not recording.engines:
        return None
    engine, use = recording.engines[-1], _use(recording)
    why_not = _why_not(recording, ending)
    more = 0 if outside is None else outside.high_bytes - outside.taken_bytes
    largest = None if why_not else largest_share(engine, use)
    if not why_not and largest is None:
        why_not = "with no share both does the engine start and does every phase fit"
    blocks = 0 if largest is None else num_blocks(engine, largest)
    phase = _peak_phase(recording)
    return EngineMemory(
        **{field.name: getattr(engine, field.name) for field in fields(EngineSettings)},
        cache_bytes=engine.num_blocks * engine.block_bytes,
        peak_awake_bytes=use.awake_bytes,
        peak_asleep_bytes=use.asleep_bytes,
        peak_phase="" if phase is None else recording.named_phases[phase].name,
        least_utilization=None if why_not else least_share(engine),
        largest_utilization=largest,
        largest_in_addition=None if largest is None else largest_share(engine, use, more),
        largest_num_blocks=blocks,
        largest_cache_bytes=blocks * engine.block_bytes,
        unknown_because=why_not,
    )


def engine_sleeps(recording: Recording) -> list[EngineSleep]:
    """How engines slept, the last time of each process and kind of sleep, in the order of their first times."""
    last = {(row.process, row.how): row for row in recording.engine_sleeps}
    times = Counter((row.process, row.how) for row in recording.engine_sleeps)
    return [EngineSleep(row.process, row.how, times[key], row.freed_bytes, row.kept) for key, row in last.items()]


def engine_advice(recording: Recording, found: EngineMemory | None, tables: dict[str, pd.DataFrame]) -> list[Advice]:
    """Advice on vLLM's engine, each with bytes of the recorded parts."""
    if found is None or (found.unknown_because and not found.peak_awake_bytes):
        return []
    rules: tuple[Callable[[], Advice | None], ...] = (
        lambda: _other_share(found),
        lambda: _offloaded_optimizer(recording, found, tables),
        lambda: _sleep(recording, found),
        lambda: _eager(found),
        lambda: _small_cache(found),
    )
    return [advice for rule in rules if (advice := rule()) is not None]


def _requested(engine: EngineRecord, share: float) -> int:
    elsewhere = math.ceil(engine.total_bytes * engine.utilization) - engine.requested_bytes
    return math.ceil(engine.total_bytes * share) - elsewhere


def _available(engine: EngineRecord, share: float) -> int:
    measured = engine.consumed_bytes + engine.activations_bytes + engine.graphs_estimate_bytes
    return _requested(engine, share) - measured


def _use(recording: Recording) -> Use:
    whole = recording.engine_use
    return Use(0, 0) if whole is None else Use(whole.peak_asleep_bytes, whole.peak_awake_bytes)


def _peak_phase(recording: Recording) -> int | None:
    """The phase with the most in use with the KV cache, the longest of several; None if that was outside of any."""
    rows, most = recording.named_phases, _use(recording).awake_bytes
    phases = [number for number, row in enumerate(rows) if row.peak_awake_bytes == most]
    return max(phases, key=lambda number: rows[number].end_op - rows[number].first_op, default=None)


def _why_not(recording: Recording, ending: Ending) -> str:
    """Why the largest share is not known; empty if it is."""
    engine = recording.engines[-1]
    if len(recording.engines) > 1:
        return f"the script made {len(recording.engines)} engines"
    if not ending.ended_well or recording.engine_use is None or recording.truncated:
        return "the run ended before its end"
    if not _use(recording).awake_bytes:
        return "only the virtual GPU counts what is in use"
    if num_blocks(engine, engine.utilization) != engine.num_blocks:
        return "the size of the KV cache does not follow from its share alone"
    return ""


def _other_share(found: EngineMemory) -> Advice | None:
    if found.largest_utilization is None or abs(found.largest_utilization - found.utilization) < _MIN_GAIN:
        return None
    larger = found.largest_cache_bytes - found.cache_bytes
    limit = f"in {found.peak_phase}" if found.peak_phase else "while the engine starts or between phases"
    return Advice(
        "engine-share",
        f"set gpu_memory_utilization={found.largest_utilization:g}"
        if larger > 0
        else f"lower gpu_memory_utilization to {found.largest_utilization:g}",
        f"with the KV cache at most {format_bytes(found.peak_awake_bytes)} was in use, {limit}; with "
        f"{found.largest_utilization:g} it has {found.largest_num_blocks:,} blocks and all fits, without what the CUDA "
        "context takes",
        abs(larger),
        "cache_bytes" if larger > 0 else "peak_used_bytes",
    )


def _offloaded_optimizer(recording: Recording, found: EngineMemory, tables: dict[str, pd.DataFrame]) -> Advice | None:
    """States that the trainer's optimizer holds through the phase that uses most with the KV cache."""
    number, blocks = _peak_phase(recording), tables["blocks"]
    if number is None or not len(blocks):
        return None
    row = tables["named_phases"].iloc[number]
    through = (blocks["alloc_event"] < row["first_event"]) & (blocks["free_event"] >= row["end_event"])
    held = int(blocks.loc[through & (blocks["category"] == "optimizer_state"), "bytes"].sum())
    if not held:
        return None
    return Advice(
        "engine-offload-optimizer",
        f"move the optimizer's states to the host during {found.peak_phase}",
        f"they hold {format_bytes(held)} through the {found.peak_phase} that uses most of the GPU",
        held,
        "peak_used_bytes",
    )


def _sleep(recording: Recording, found: EngineMemory) -> Advice | None:
    """An engine that never sleeps, or one that keeps weights on the host that the next weight sync replaces."""
    held = found.weights_bytes + found.cache_bytes
    if not recording.engine_sleeps:
        how = "call its sleep(level=1)" if found.can_sleep else "enable_sleep_mode=True (TRL: vllm_enable_sleep_mode)"
        return Advice(
            "engine-sleep",
            f"let the engine sleep while the trainer trains: {how}",
            f"its weights and its KV cache, {format_bytes(held)}, stay on the GPU all the time",
            held,
            "peak_used_bytes",
        )
    syncs = any(row.name == "weight sync" for row in recording.named_phases)
    if not syncs or recording.engine_sleeps[-1].how != "level 1":
        return None
    return Advice(
        "engine-sleep-level",
        "let the engine sleep with sleep(level=2)",
        f"level 1 keeps {format_bytes(found.weights_bytes)} of weights in the host's memory, which each weight sync "
        "replaces; the GPU's memory is the same",
        found.weights_bytes,
        "host_bytes",
    )


def _eager(found: EngineMemory) -> Advice | None:
    if found.enforce_eager or not found.graphs_bytes:
        return None
    return Advice(
        "engine-eager",
        "make no CUDA graphs: enforce_eager=True",
        f"the engine's CUDA graphs took {format_bytes(found.graphs_bytes)}, which do not sleep; decoding takes longer "
        "without them",
        found.graphs_bytes,
        "peak_used_bytes",
    )


def _small_cache(found: EngineMemory) -> Advice | None:
    if found.cache_dtype not in _OF_TWO_BYTES:
        return None
    return Advice(
        "engine-fp8-cache",
        'keep the KV cache in fp8: kv_cache_dtype="fp8"',
        f"the KV cache has {found.num_blocks * found.block_tokens:,} tokens in {found.cache_dtype}; in fp8 as many "
        "take half; what is generated changes",
        found.cache_bytes // 2,
        "peak_used_bytes",
    )
