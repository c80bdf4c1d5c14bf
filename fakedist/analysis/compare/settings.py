"""What two runs were that is not the same: whoever reads the figures must know first."""

from __future__ import annotations

from typing import Any

#: Settings of a job: their key and what they are called.
_JOB = {
    "world_size": "world size",
    "rank": "rank",
    "target": "script",
    "arguments": "arguments",
    "gpus_per_node": "GPUs a node",
    "device": "device",
    "gpu_memory_bytes": "GPU memory",
    "steps": "steps asked for",
    "launcher": "launcher",
    "collectives": "collectives",
    "values": "values",
    "environment": "variables",
    "seed": "seed",
}


def different_settings(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, str]]:
    """Every setting that two manifests disagree about: objects with ``name``, ``a``, ``b``.

    Args:
        a: A manifest with its summary.
        b: That of the other run.
    """
    pairs: list[tuple[str, Any, Any]] = [(name, a["job"].get(key), b["job"].get(key)) for key, name in _JOB.items()]
    pairs += [("NCCL's variables", *_nccl(a["job"], b["job"]))]
    pairs += [(name, a["summary"].get(name), b["summary"].get(name)) for name in ("torch", "gpu")]
    pairs += [
        ("steps that ended", len(a["summary"]["steps"]), len(b["summary"]["steps"])),
        ("how it ended", _ending(a["summary"]["exit"]), _ending(b["summary"]["exit"])),
        ("times", _times(a["summary"]), _times(b["summary"])),
        ("fakedist", a.get("fakedist"), b.get("fakedist")),
    ]
    return [{"name": name, "a": _text(one), "b": _text(other)} for name, one, other in pairs if one != other]


def _nccl(a: dict[str, Any], b: dict[str, Any]) -> tuple[Any, Any]:
    """NCCL's variables of two jobs; an older fakedist knew of none."""
    return a.get("nccl_environment") or [], b.get("nccl_environment") or []


def unlike_times(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Why the times of two summaries cannot be held against each other as they are, a sentence each."""
    sources = [each["kernels"] for each in (a, b)]
    if any(each["time"] is None for each in (a, b)):
        return []
    words = [source["source"] for source in sources]
    if words[0] != words[1]:
        told = f"the times of A are {words[0]}, those of B {words[1]}"
        return [f"{told}: what differs may be the model's error and no change of the job"]
    unknown = [each["time"]["num_unknown_calls"] for each in (a, b)]
    if bool(unknown[0]) != bool(unknown[1]):
        return ["the duration of collectives is known of one of the runs only: their steps are not alike"]
    return []


def _times(summary: dict[str, Any]) -> str:
    if summary["time"] is None:
        return "none"
    return f"{summary['kernels']['source']} ({summary['kernels'].get('tool', '')})"


def incomplete(summary: dict[str, Any]) -> str:
    """How a run fell short of its end, one phrase; empty where it did not."""
    ending = summary["exit"]
    if ending["outcome"] in ("finished", "stopped"):
        return ""
    steps = len(summary["steps"])
    return f"{_ending(ending)} after {steps} step{'' if steps == 1 else 's'}: its figures are those until then"


def _ending(ending: dict[str, Any]) -> str:
    outcome = str(ending["outcome"]).replace("_", " ")
    if ending["outcome"] == "stopped":
        outcome = "finished"  # stopped after --steps
    message = str(ending.get("message", "")).split(". ")[0]
    return outcome + (f" ({message})" if message and outcome != "finished" else "")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join("=".join(map(str, each)) if isinstance(each, list | tuple) else str(each) for each in value)
    return "" if value is None else str(value)
