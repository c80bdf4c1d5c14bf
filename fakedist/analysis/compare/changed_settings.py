"""The settings in which two runs differ. A reader must know them before the figures."""

from __future__ import annotations

from fakedist.run.manifest import Manifest
from fakedist.run.outcome import Ending, Outcome
from fakedist.run.summary import Summary
from fakedist.units import format_bytes

#: Settings of a job: their keys and display names.
_JOB = {
    "world_size": "world size",
    "rank": "rank",
    "target": "script",
    "arguments": "arguments",
    "gpus_per_node": "GPUs a node",
    "device": "device",
    "gpu_memory_bytes": "GPU memory",
    "gpu_power_watts": "GPU power limit in watts",
    "steps": "steps asked for",
    "launcher": "launcher",
    "collectives": "collectives",
    "values": "values",
    "environment": "variables",
    "seed": "seed",
    "nccl_environment": "NCCL's variables",
}


def different_settings(a: Manifest, b: Manifest, summaries: tuple[Summary, Summary]) -> list[dict[str, str]]:
    """Every setting in which two manifests differ: objects with ``name``, ``a``, ``b``.

    Args:
        a: The manifest of one run.
        b: The manifest of the other.
        summaries: The figures of both.
    """
    pairs: list[tuple[str, object, object]] = [(name, _setting(a, key), _setting(b, key)) for key, name in _JOB.items()]
    one, other = summaries
    pairs += [
        ("git commit", a.git_commit, b.git_commit),
        ("torch", one.torch, other.torch),
        ("gpu", one.gpu, other.gpu),
        ("steps that ended", len(one.steps), len(other.steps)),
        ("how it ended", _ending(one.exit), _ending(other.exit)),
        ("times", _times(one), _times(other)),
        ("fakedist", a.fakedist, b.fakedist),
    ]
    return [{"name": name, "a": _text(mine), "b": _text(theirs)} for name, mine, theirs in pairs if mine != theirs]


def _setting(manifest: Manifest, key: str) -> object:
    value = getattr(manifest.job, key, None)
    return format_bytes(value) if key == "gpu_memory_bytes" and value is not None else value


def unlike_times(a: Summary, b: Summary) -> list[str]:
    """Why the times of two summaries are not directly comparable, one sentence each."""
    if a.timed is None or b.timed is None:
        return []
    timed = (a.timed, b.timed)
    words = [source.source for _, source in timed]
    if words[0] != words[1]:
        told = f"the times of A are {words[0]}, those of B {words[1]}"
        return [f"{told}: a difference may be the model's error, not a change of the job"]
    unknown = [time.num_unknown_calls for time, _ in timed]
    if bool(unknown[0]) != bool(unknown[1]):
        return ["only one of the runs knows the duration of its collectives: their steps cannot be compared"]
    return []


def _times(summary: Summary) -> str:
    return "none" if summary.timed is None else f"{summary.timed[1].source} ({summary.timed[1].tool})"


def incomplete(summary: Summary) -> str:
    """How a run ended early, in one phrase; empty if it did not."""
    ending = summary.exit
    if ending.outcome in (Outcome.FINISHED, Outcome.STOPPED):
        return ""
    steps = len(summary.steps)
    return f"{_ending(ending)} after {steps} step{'' if steps == 1 else 's'}: its figures end there"


def _ending(ending: Ending) -> str:
    if ending.outcome in (Outcome.FINISHED, Outcome.STOPPED):
        return "finished"  # a run is stopped after --steps
    message = ending.message.split(". ")[0]
    return ending.outcome.replace("_", " ") + (f" ({message})" if message else "")


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join("=".join(map(str, each)) if isinstance(each, list | tuple) else str(each) for each in value)
    return "" if value is None else str(value)
