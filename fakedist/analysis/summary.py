"""The run in one object: what ``--json`` prints, and what the terminal shows first."""

from __future__ import annotations

from typing import Any

import pandas as pd

from fakedist.analysis.advice import find_advice
from fakedist.analysis.layers import fold_layers, fold_table, unfolded
from fakedist.analysis.memory import layer_names
from fakedist.analysis.outside.estimate import estimate_outside, room
from fakedist.analysis.recording import Recording
from fakedist.job import UNLIMITED_BYTES
from fakedist.run.schema import CATEGORIES, SCHEMA_VERSION

_ONE_REPEAT = ("least_peak_bytes", "median_peak_bytes", "largest_peak_bytes")


def summarize(
    recording: Recording, manifest: dict[str, Any], tables: dict[str, pd.DataFrame], peak: dict[str, Any]
) -> dict[str, Any]:
    """The object of ``--json`` but for ``run_directory``; keys in ``run.schema.SUMMARY``.

    Args:
        recording: The recording.
        manifest: run.json as the parent left it.
        tables: Tables by name.
        peak: What :func:`fakedist.analysis.memory.peak_summary` gave.
    """
    job, gpu = manifest["job"], recording.gpu
    ending = _ending(recording, manifest)
    capacity = int(gpu.get("capacity_bytes", 0))
    if job.get("gpu_memory_bytes") == UNLIMITED_BYTES:
        capacity = int(gpu.get("spec_memory_bytes") or capacity)
    outside = estimate_outside(tables, *_outside(recording, job))
    beside = room(peak["peak_reserved_bytes"], outside, capacity)
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": job["world_size"],
        "rank": job["rank"],
        "device": job["device"],
        "gpu": gpu.get("gpu_name", ""),
        "torch": gpu.get("torch", ""),
        "exit": ending,
        "left_during_init": _left_during_init(recording, ending),
        "fits": ending["outcome"] != "out_of_memory" and beside != "does not fit",
        "capacity_bytes": capacity,
        **{key: peak[key] for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_step", "peak_phase")},
        "estimated_outside": {**outside, "beside_reserved": beside},
        "by_phase": tables["phases"].astype({"phase": str}).to_dict("records"),
        "by_category": peak["by_category"],
        "layers": layer_objects(tables["layers"]),
        "largest_blocks": tables["largest"].to_dict("records"),
        "collectives": _collectives(tables),
        "steps": tables["steps"].drop(columns="start_us").to_dict("records"),
        "kernels": recording.kernel_source or None,
        "time": None,
        "out_of_memory": _out_of_memory(recording, ending, tables["events"]),
        "advice": find_advice(tables),
        "invented_values": int(tables["invented"]["num_values"].sum()),
    }


def layer_objects(layers: pd.DataFrame, *, fold: bool = True) -> list[dict[str, Any]]:
    """Layers with anything in them, as ``--json`` shows them; repeated ones folded into one unless told otherwise."""
    rows = fold_table(layers, fold_layers(layers) if fold else unfolded(layers)).to_dict("records")
    return [
        {
            "name": row["name"],
            "class_name": row["class_name"],
            "num_repeats": row["num_repeats"],
            "peak_bytes": {name: row[f"peak_{name}_bytes"] for name in CATEGORIES if row[f"peak_{name}_bytes"]},
            "peak_own_bytes": row["peak_own_bytes"],
            **{key: row[key] for key in ("peak_total_bytes", *_ONE_REPEAT)},
            "most_bytes": {
                name: row[f"most_total_{name}_bytes"] for name in CATEGORIES if row[f"most_total_{name}_bytes"]
            },
            "most_total_bytes": row["most_total_bytes"],
        }
        for row in rows
        if row["peak_total_bytes"] or row["most_total_bytes"]
    ]


def _ending(recording: Recording, manifest: dict[str, Any]) -> dict[str, Any]:
    """What the parent saw, unless the rank itself knows better."""
    seen = dict(manifest["exit"])
    told = recording.outcome
    if not told and seen["outcome"] == "running":  # neither the rank nor its parent lived to say more
        return {**seen, "outcome": "killed", "message": "with fakedist profile, which was killed"}
    if told and seen["outcome"] in ("running", "exit", told["outcome"]):
        code = seen["code"] if seen["code"] is not None else told["code"]
        return {"outcome": told["outcome"], "code": code, "message": told.get("message", "")}
    return seen


def _left_during_init(recording: Recording, ending: dict[str, Any]) -> dict[str, str] | None:
    """Where the script ended by itself before its first step; None if it did not."""
    told = recording.outcome
    if ending["outcome"] not in ("exit", "finished") or not told or told["last_step"]:
        return None
    return {"line": told.get("line", "")}


def _outside(recording: Recording, job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the estimate of memory outside of the caching allocator asks of a recording: where, and what was seen."""
    nccl, found = recording.nccl, recording.outside
    place = {"gpu_name": recording.gpu.get("gpu_name", ""), "gpus_per_node": job["gpus_per_node"]}
    return place, {
        "environment": nccl.get("environment", {}),
        "version": nccl.get("version", ""),
        "bound": recording.bound,
        "measured_bytes": found["used_bytes"] - found["reserved_bytes"] if found else None,
    }


def _collectives(tables: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    groups = tables["groups"]
    found = []
    for row in tables["collectives"].to_dict("records"):
        group = groups.iloc[int(row["group"])] if int(row["group"]) < len(groups) else None
        name = "" if group is None else str(group["description"] or group["name"])
        size = 0 if group is None else int(group["size"])
        rest = {key: row[key] for key in ("operation", "num_calls", "bytes_in", "bytes_out")}
        found.append({"group": name, "group_size": size, **rest})
    return found


def _out_of_memory(recording: Recording, ending: dict[str, Any], events: pd.DataFrame) -> dict[str, Any] | None:
    """The request that ended the run: how much, who asked, and what was held then."""
    failed = recording.out_of_memory
    if failed is None or ending["outcome"] != "out_of_memory":
        return None
    operation = ""
    if 0 <= failed["op"] < len(recording.op_operation):
        operation = dict(recording.rows["operations"]).get(int(recording.op_operation[failed["op"]]), "")
    names = layer_names(recording)
    layer = failed["layer"] if isinstance(failed["layer"], str) else names[failed["layer"]]
    then = events[events["action"] == "oom"]
    held = ("allocated_bytes", "reserved_bytes")
    return {
        "requested_bytes": failed["requested_bytes"],
        "layer": layer,
        "operation": operation,
        "line": failed.get("line", ""),
        **{name: int(then[name].iloc[-1]) if len(then) else 0 for name in held},
    }
