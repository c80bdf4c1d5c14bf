"""An entry of the catalogue: one job of one framework, and what its run must show."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.catalogue.arithmetic import Arithmetic
from tests.conftest import ROOT

#: What a training step holds at some time, whatever the framework.
TRAINING = ("parameter", "gradient", "optimizer_state", "activation")


@dataclass(frozen=True)
class Refusal:
    """Why a job cannot run, as the table says it, and the words in its output by which the run proves that.

    Attributes:
        says: Part of what the run prints on stderr or stdout; it must end with an exit code that is not 0.
        reason: The reason in a sentence.
    """

    says: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """One job: what is run and what its records must hold.

    Attributes:
        framework: Name for the table.
        feature: What of the framework the job uses; framework and feature together name the entry.
        script: Path from the root of the repository, or ``-m MODULE``.
        package: Distribution whose version stands in the table; where it is missing the entry is not run.
        arguments: The script's own arguments.
        world_size: Ranks of the job.
        ranks: Those that are run: the first, one in the middle, the last; one of each stage of a pipeline.
        requires: Further distributions that the job needs.
        exactly: Versions without which it does not run; where others are installed the entry is not run.
        tools: Programs that it needs, on PATH.
        fast: The ranks that CI runs with every change. All of them together take under 8 minutes on 2 cores.
        options: Further options of ``fakedist profile``.
        steps: Steps to record, which the run must have seen.
        categories: Categories that must have held memory at some time.
        collectives: Operations that must have been called; ``all_gather`` is any that begins so.
        attributed: Least part of the bytes at the peak that belongs to a layer or a copy of the parameters.
        from_init: Whether init must end with all parameters: no work before training may take it away.
        silent: Codes of notes that the report must not have.
        prints: What the script must print; ``{local_rank}`` stands for the rank on its node of 8.
        prepare: Writes what the job reads into the directory that it runs in.
        refused: Set for a job that cannot run.
        taped: Whether each rank is answered from the tapes of those before it.
        together: Whether one command runs all ranks, those again that wait for what a later one sends.
        minutes: Timeout of one rank.
        arithmetic: What the job's sizes say that a rank holds and computes.
        environment: Further variables; ``{directory}`` in a value is the directory that it runs in.
        checkout: ``owner/name@commit`` of a repository without a package, a folder ``name`` of $FAKEDIST_CHECKOUTS; the
            script is its own.
    """

    framework: str
    feature: str
    script: str
    package: str = "torch"
    arguments: tuple[str, ...] = ()
    world_size: int = 8
    ranks: tuple[int, ...] = (0,)
    requires: tuple[str, ...] = ()
    exactly: dict[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    fast: tuple[int, ...] = ()
    options: tuple[str, ...] = ()
    steps: int = 2
    categories: tuple[str, ...] = TRAINING
    collectives: tuple[str, ...] = ()
    attributed: float = 0.0
    from_init: bool = False
    silent: tuple[str, ...] = ()
    prints: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    refused: Refusal | None = None
    taped: bool = False
    together: bool = False
    minutes: float = 5
    arithmetic: Callable[[int], Arithmetic] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    checkout: str = ""

    @property
    def root(self) -> Path:
        """Directory that the script's path starts from."""
        name = self.checkout.partition("@")[0].rpartition("/")[2]
        return Path(os.environ.get("FAKEDIST_CHECKOUTS", "checkouts"), name) if name else ROOT

    @property
    def name(self) -> str:
        return f"{self.framework}: {self.feature}"

    @property
    def missing(self) -> list[str]:
        """Distributions and programs that the job needs and that are not there."""
        distributions = [name for name in (self.package, *self.requires) if version(name) is None]
        others = [f"{name} {wanted}" for name, wanted in self.exactly.items() if version(name) != wanted]
        others += [f"{self.checkout} in $FAKEDIST_CHECKOUTS"] if not self.root.is_dir() else []
        return distributions + others + [name for name in self.tools if shutil.which(name) is None]


def version(distribution: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
