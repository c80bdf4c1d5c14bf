"""The rollout of an inference engine: its time and what it generates."""

from __future__ import annotations

from functools import partial

from fakedist.extras.rl.rollout_time import RolloutTime
from fakedist.report.content.report_blocks import Fact, Facts, Remark, Report
from fakedist.rundir.plain import to_plain
from fakedist.units import format_us

_REMARKS = (
    "continuous batching as in vLLM 0.33.0, with CUDA graphs and asynchronous scheduling; no prompts share a prefix",
    "the host takes as long for a step as vLLM did on one machine; --host scales it",
)


def rollout_report(rollout: RolloutTime) -> Report:
    """How long a rollout takes, what it generates, and where its time goes."""
    whole = rollout.time_us or 1.0
    parts = sorted(rollout.parts, key=lambda part: -part.time_us)
    interval = f"90 % interval: {format_us(rollout.low_us)} to {format_us(rollout.high_us)}"
    asked = f"{rollout.num_requests:,} requests, {rollout.prompt_tokens:,} tokens a prompt"
    given_back = f"{rollout.num_given_back:,.0f} times a request gave its slots of the KV cache back"
    decoding = f"mean of the steps; at most {rollout.most_decoding:,}"
    tail = "of the time: none waits, and at most a quarter of the most requests decode"
    figures = [
        ("rollout", format_us(rollout.time_us), interval),
        ("generated", f"{rollout.generated_tokens:,.0f} tokens", asked),
        ("tokens/s", f"{rollout.tokens_per_s:,.0f}", f"{rollout.ranks} GPU{'s' * (rollout.ranks > 1)} of the engine"),
        ("steps", f"{rollout.num_steps:,.0f}", given_back if rollout.num_given_back >= 1 else ""),
        ("decoding at once", f"{rollout.mean_decoding:,.1f} requests", decoding),
        ("tail", f"{rollout.tail_us / whole:.0%}", tail),
    ]
    figures += [(part.name, f"{part.time_us / whole:.1%}", format_us(part.time_us)) for part in parts]
    facts = Facts([Fact(*figure) for figure in figures], "Rollout of one engine, simulated and estimated")
    return Report("rollout", [facts, *map(Remark, _REMARKS)], partial(_rollout_object, rollout))


def _rollout_object(rollout: RolloutTime) -> dict[str, object]:
    plain = to_plain(rollout)
    assert isinstance(plain, dict)
    return {**plain, "tokens_per_s": rollout.tokens_per_s}
