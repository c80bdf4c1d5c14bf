"""Runs an entry of the catalogue as a user would, on the virtual GPU, and sees that the run shows what it must."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tests.clients.agreement import Phases, disagreement, found_by
from tests.clients.catalogue import Entry
from tests.clients.longer import lengthened
from tests.conftest import ROOT, clean_environment

#: Nothing is fetched: models have random weights, data is made by the job.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}
#: Set to run the longer program of each script (:mod:`tests.clients.longer`). The results are not kept.
LONGER = "FAKEDIST_LONGER"
#: Load beyond the machine's cores from which on a wall time is called disturbed.
_LOAD_BEYOND_CORES = 0.5
#: The row of a whole model.
_MODEL = re.compile(r"\([^()]+\)")


class WrongRunError(Exception):
    """A run was not what the catalogue says: what was expected, what was seen, and the end of its output."""


@dataclass(frozen=True)
class Ran:
    """One rank of an entry that ran as it had to.

    Attributes:
        directory: The run directory.
        wall_s: Seconds from the command line to its end, report included.
        disturbed: Whether the machine had more to do than its cores could before this run began.
        summary: The object of ``fakedist report --json``; empty for a job that is refused.
        stdout: What the job and the report printed.
    """

    directory: Path
    wall_s: float
    disturbed: bool
    summary: dict[str, Any]
    stdout: str

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_parquet(self.directory / f"tables/{name}.parquet")


def run_rank(entry: Entry, rank: int, directory: Path, tapes: Sequence[Path] = ()) -> Ran:
    """Run one rank of an entry in ``directory``, answered from the tapes of the run directories ``tapes``.

    Raises:
        WrongRunError: It did not end, hold or call what the entry says.
    """
    output = directory / "run"
    run = output / f"rank{rank}" if "--with-peers" in entry.options else output
    options = [f"--tape={tape}" for tape in tapes]
    disturbed, began = _is_disturbed(), time.monotonic()
    finished = _finished(entry, directory, ["--rank", str(rank), "--output", str(output), *options])
    wall_s = time.monotonic() - began
    if entry.refused:
        _raise_if(_wrong_refusal(entry, finished), entry, rank, finished)
        return Ran(run, wall_s, disturbed, {}, finished.stdout)
    _raise_if(_wrong_ending(finished), entry, rank, finished)
    return _checked(entry, rank, finished, Ran(run, wall_s, disturbed, _summary(run), finished.stdout))


def run_together(entry: Entry, directory: Path) -> list[Ran]:
    """Run all ranks of an entry by one command.

    Raises:
        WrongRunError: As :func:`run_rank`.
    """
    runs = directory / "runs"
    chosen = ",".join(map(str, entry.ranks))
    disturbed = _is_disturbed()
    finished = _finished(entry, directory, ["--rank", chosen, "--output", str(runs), "--json"])
    _raise_if(_wrong_ending(finished), entry, entry.ranks[0], finished)
    found = json.loads(finished.stdout)["ranks"]
    ran = [Ran(runs / f"rank{one['rank']}", one["wall_s"], disturbed, one, finished.stderr) for one in found]
    return [_checked(entry, rank, finished, one) for rank, one in zip(entry.ranks, ran, strict=True)]


def _is_disturbed() -> bool:
    return os.getloadavg()[0] > (os.cpu_count() or 1) + _LOAD_BEYOND_CORES


def _finished(entry: Entry, directory: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    directory.mkdir(parents=True, exist_ok=True)
    if entry.prepare is not None:
        entry.prepare(directory)
    where = [
        "--device",
        "virtual",
        "--world-size",
        str(entry.world_size),
        "--steps",
        str(entry.steps),
        "--force",
        "--no-page",
    ]
    target = _target(entry)
    own = {name: value.format(directory=directory) for name, value in entry.environment.items()}
    if entry.checkout:
        own["PYTHONPATH"] = f"{ROOT}{os.pathsep}{entry.root}"
    if os.environ.get(LONGER) and target[0] != "-m":
        script = Path(target[0])
        target[0] = str(directory / script.name)
        Path(target[0]).write_text(lengthened(script.read_text()))
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(script.parent), own.get("PYTHONPATH", str(ROOT)))))
    command = [sys.executable, "-m", "fakedist", "profile", *where, *entry.options, *options, *target]
    try:
        return subprocess.run(
            command,
            cwd=directory,
            env=clean_environment() | OFFLINE | {"HF_HOME": str(directory / "hf")} | own,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=entry.minutes * 60,
        )
    except subprocess.TimeoutExpired:
        raise WrongRunError(f"{entry.name}, rank {options[1]}: not done after {entry.minutes:g} minutes") from None


def _raise_if(wrong: str, entry: Entry, rank: int, finished: subprocess.CompletedProcess[str]) -> None:
    if wrong:
        printed = "\n".join((*finished.stdout.splitlines()[-15:], *finished.stderr.splitlines()[-25:]))
        raise WrongRunError(f"{entry.name}, rank {rank}: {wrong}\n{' '.join(finished.args)}\n{printed}")


def _checked(entry: Entry, rank: int, finished: subprocess.CompletedProcess[str], ran: Ran) -> Ran:
    """A run whose records hold what they must."""
    _raise_if(_wrong_records(entry, ran.summary, ran.directory, ran.stdout), entry, rank, finished)
    if entry.arithmetic is not None:
        tables = {name: ran.table(name) for name in ("blocks", "spans")}
        phases = Phases.of(tables["spans"], ran.summary)
        wrong = disagreement(entry.arithmetic(rank), found_by(tables, ran.summary), phases)
        _raise_if(wrong, entry, rank, finished)
    return ran


def _target(entry: Entry) -> list[str]:
    module = entry.script.removeprefix("-m ")
    return ["-m", module, *entry.arguments] if module != entry.script else [str(entry.root / module), *entry.arguments]


def _wrong_refusal(entry: Entry, finished: subprocess.CompletedProcess[str]) -> str:
    assert entry.refused is not None
    if finished.returncode == 0:
        return f"it ran, and the catalogue says that it cannot ({entry.refused.reason})"
    if entry.refused.says not in finished.stderr + finished.stdout:
        return f"it ended with {finished.returncode}, but did not say {entry.refused.says!r}"
    return ""


def _wrong_ending(finished: subprocess.CompletedProcess[str]) -> str:
    return f"exit code {finished.returncode}, expected 0" if finished.returncode else ""


def _wrong_records(entry: Entry, summary: dict[str, Any], run: Path, stdout: str) -> str:
    """The first thing that a good run's records lack; empty for nothing."""
    steps = len(summary["steps"])
    held = pd.read_parquet(run / "tables/blocks.parquet", columns=["category"])["category"].unique()
    called = {call["operation"] for call in summary["collectives"]}
    unanswered = pd.read_parquet(run / "tables/unanswered.parquet")
    if summary["peak_allocated_bytes"] <= 0:
        return "it allocated nothing"
    if steps != entry.steps:
        return f"{entry.steps} steps were to be recorded, {steps} were"
    if missing := set(entry.categories) - set(held):
        return f"no memory of the category {', '.join(sorted(missing))}"
    if missing := [name for name in entry.collectives if not any(call.startswith(name) for call in called)]:
        return f"{', '.join(missing)} not called, only {', '.join(sorted(called)) or 'nothing'}"
    if len(unanswered):
        return f"the virtual GPU did not answer {', '.join(unanswered.iloc[:, 0].astype(str))}"
    if wrong := _wrong_report(entry, summary):
        return wrong
    prints = [text.format(local_rank=summary["rank"] % 8) for text in entry.prints]
    silent = [text for text in prints if text not in stdout]
    return f"it did not print {', '.join(map(repr, silent))}" if silent else ""


def _wrong_report(entry: Entry, summary: dict[str, Any]) -> str:
    """The first fault of the report: bytes without a layer, parameters that init lacks, notes that are not true."""
    outside = sum(layer["peak_own_bytes"] for layer in summary["layers"] if not layer["name"])
    attributed = 1 - outside / summary["peak_allocated_bytes"]
    if attributed < entry.attributed:
        return f"{attributed:.1%} of the peak has a layer, at least {entry.attributed:.0%} must"
    if entry.attributed and (wrong := _two_models(summary)):
        return wrong
    if entry.from_init and entry.arithmetic is not None:
        arithmetic = entry.arithmetic(summary["rank"])
        wanted = arithmetic.parameters or arithmetic.gradients or 0
        held = max((row["end_allocated_bytes"] for row in summary["by_phase"] if row["step"] == 0), default=0)
        if held < wanted:
            return f"init ended with {held:,} bytes, parameters alone are {wanted:,.0f}"
    loud = [note["text"] for note in summary["notes"] if note["code"] in entry.silent]
    return f"it notes {loud[0]!r}" if loud else ""


def _two_models(summary: dict[str, Any]) -> str:
    """Whether one model has the optimizer's states and another most activations: each has a row ``(its class)``."""
    models = [layer for layer in summary["layers"] if _MODEL.fullmatch(layer["name"])]
    most = {
        category: max(models, key=lambda layer: layer["peak_bytes"].get(category, 0))["name"]
        for category in ("optimizer_state", "activation")
        if sum(layer["peak_bytes"].get(category, 0) for layer in models) > 0.1 * summary["peak_allocated_bytes"]
    }
    if len(set(most.values())) < 2:
        return ""
    return f"{most['optimizer_state']} has the optimizer's states, {most['activation']} the activations"


def _summary(run: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "fakedist", "report", str(run), "--json"]
    finished = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=True)
    loaded = json.loads(finished.stdout)
    assert isinstance(loaded, dict)
    return loaded
