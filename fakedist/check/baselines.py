"""Baselines: the figures with which a job is compared, one small file per job, readable in a code review."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from fakedist.bounded import UnreadableError, read_json
from fakedist.check.config import CheckConfig, CheckJob
from fakedist.check.measured import RankFigures, RankRecord
from fakedist.errors import CheckError
from fakedist.rundir.plain import PlainValueError, from_plain
from fakedist.rundir.summary import Summary
from fakedist.temporary import replacing

SCHEMA_VERSION = 1
_MAKES_ONE = "fakedist check --update {}"
#: Settings of the job that determine its figures.
_SETTINGS = (
    "target",
    "arguments",
    "world_size",
    "gpus_per_node",
    "device",
    "gpu_memory_bytes",
    "reserve_bytes",
    "steps",
    "launcher",
    "collectives",
    "values",
    "environment",
    "seed",
)


@dataclass(frozen=True)
class Baseline:
    """A job's figures when its baseline was made, and its settings then, with ``torch`` and ``gpu``."""

    settings: dict[str, object]
    ranks: dict[int, RankFigures]


@dataclass(frozen=True)
class _Plain:
    settings: dict[str, object]
    ranks: dict[str, RankRecord]


def baseline_path(config: CheckConfig, job: CheckJob) -> Path:
    """The path of a job's baseline."""
    return config.baselines / f"{job.name}.json"


def read_baseline(config: CheckConfig, job: CheckJob) -> Baseline | None:
    """Read a job's baseline. None if it does not exist.

    Raises:
        CheckError: The baseline is damaged or has a newer schema. Or the job has tolerances, and the baseline is
            missing or lacks a rank.
    """
    path = baseline_path(config, job)
    again = _MAKES_ONE.format(job.name)
    try:
        values = read_json(path)
        if not isinstance(values, dict) or not isinstance(version := values.get("schema_version"), int):
            raise PlainValueError("it has no schema_version")
    except FileNotFoundError:
        if job.tolerances:
            raise CheckError(
                f"job {job.name!r} has max_increase but no baseline: {path} does not exist", again
            ) from None
        return None
    except OSError as error:
        raise CheckError(f"{path} cannot be read: {error.strerror}", again) from None
    except (UnreadableError, PlainValueError) as error:
        raise CheckError(f"{path} is not a baseline: {error}", again) from None
    if version > SCHEMA_VERSION:
        raise CheckError(
            f"{path} has schema version {version}; this fakedist reads up to {SCHEMA_VERSION}",
            "pip install --upgrade fakedist",
        )
    try:
        plain = from_plain(_Plain, values)
        baseline = Baseline(
            plain.settings, {int(rank): RankFigures.from_record(record) for rank, record in plain.ranks.items()}
        )
    except ValueError as error:  # PlainValueError is one; or a rank is not a number
        raise CheckError(f"{path} is not a baseline: {error}", again) from None
    for rank_job in job.jobs:
        if job.tolerances and rank_job.rank not in baseline.ranks:
            raise CheckError(f"{path} has no rank {rank_job.rank} of job {job.name!r}", again)
    return baseline


def settings_of(job: CheckJob, summary: Summary) -> dict[str, object]:
    """The settings that determine a job's figures."""
    values = job.jobs[0].to_dict()
    if values["steps"] == "auto":
        values["steps"] = len(summary.steps)  # the number of recorded steps
    return {
        **json.loads(json.dumps({key: values[key] for key in _SETTINGS})),
        "torch": summary.torch,
        "gpu": summary.gpu,
    }


def stale_settings(baseline: Baseline, settings: Mapping[str, object]) -> list[str]:
    """The settings in which a baseline differs from what ran, one phrase each. Torch and GPU come first."""
    keys = ["torch", "gpu", *(key for key in _SETTINGS if key in settings)]
    return [
        f"{key.replace('_', ' ').replace('target', 'script').replace('gpu', 'GPU')} {_text(was)} -> {_text(now)}"
        for key in keys
        if (was := baseline.settings.get(key)) != (now := settings.get(key))
    ]


def baseline_text(settings: Mapping[str, object], ranks: Mapping[int, RankFigures]) -> str:
    """The text of a baseline's file: sorted, one figure per line."""
    values = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "ranks": {str(rank): figures.record.to_plain() for rank, figures in ranks.items()},
    }
    return json.dumps(values, indent=1, sort_keys=True) + "\n"


def write_baselines(texts: Mapping[Path, str]) -> None:
    """Replace baselines. All new files are written next to the old ones before the first old one is replaced.

    Raises:
        CheckError: They cannot be written. The old ones are unchanged.
    """
    try:
        with ExitStack() as stack:  # on exit the new files replace the old ones, unless one could not be written
            for path, text in texts.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(replacing(path)).write_text(text, encoding="utf-8")
    except OSError as error:
        path = error.filename2 or error.filename
        raise CheckError(
            f"{path} cannot be written: {error.strerror}", "make room on the disk, or check its permissions"
        ) from error


def _text(value: object) -> str:
    if isinstance(value, list):
        return repr(" ".join(map(str, value)))
    return "none" if value is None else str(value)
