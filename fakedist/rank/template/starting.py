"""How a rank's process starts: on its own, or as a fork of a template."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fakedist.options import Job
from fakedist.rank.template.collector import OutermostImport, set_counts
from fakedist.rank.template.hidden import HiddenModules
from fakedist.rank.template.learned import TORCH, Learned, Learner, installed_modules, write_learned

#: Environment variable with what a rank that starts on its own is told. It is removed before the script runs.
START_VARIABLE = "FAKEDIST_START"
#: Modules that a rank imports besides the template's, from which on the next template imports them too. It takes
#: seconds of work to make a new template.
_WORTH_ANOTHER = 40


class Start:
    """A rank that starts on its own.

    Args:
        learn: The file that takes what its script imports. None for none.
        restarted: What differed from a template, so that the rank starts again on its own. Empty if nothing did.
    """

    #: The process that asked for the rank, if that is not its parent.
    parent: int | None = None

    def __init__(self, learn: Path | None = None, restarted: str = "") -> None:
        self.restarted = restarted
        self._path = learn
        self._environment = dict(os.environ)
        self._learner: Learner | None = None

    @classmethod
    def from_environment(cls) -> Start:
        """What this process was told, which the script and its programs do not see."""
        told = json.loads(os.environ.pop(START_VARIABLE, "{}"))
        return cls(Path(told["learn"]) if told.get("learn") else None, told.get("restarted", ""))

    def at_exit(self, leave: Callable[[], None]) -> bool:
        """Call this when the process ends, after what is registered from now on. Returns whether it is last of all."""
        return register_last(leave)

    def begin(self, job: Job, restart: Callable[[str], None]) -> None:
        """The job is known, and the script has not begun.

        Args:
            job: The job.
            restart: Ends this process, and starts the rank on its own, because of what is named.
        """
        if self._path is not None:
            self._learner = Learner(self._path, job, self._environment)

    def asked(self, name: str) -> bool:
        """A module is looked for. Returns whether :meth:`imported` is to be called when it has been imported."""
        return self._learner is not None and self._learner.asked(name)

    def imported(self, module: ModuleType) -> None:
        """A module has been imported."""
        if self._learner is not None:
            self._learner.imported(module.__name__)

    def cuda_begins(self) -> None:
        """CUDA is initialised. Nothing is allocated yet."""
        if self._learner is not None:
            self._learner.cuda_begins()

    def over(self) -> None:
        """The script has ended, after it imported torch."""
        if self._learner is not None:
            with suppress(OSError):
                self._learner.write()


def register_last(leave: Callable[[], None]) -> bool:
    """Call this when the process ends. Returns whether nothing follows: ``sitecustomize`` may come before us."""
    is_last = not atexit._ncallbacks()
    atexit.register(leave)
    return is_last


def start_variable(learn: Path | None, restarted: str) -> dict[str, str]:
    """The variable that :meth:`Start.from_environment` reads."""
    return {START_VARIABLE: json.dumps({"learn": None if learn is None else str(learn), "restarted": restarted})}


@dataclass(frozen=True)
class Ready:
    """What a template has imported.

    Attributes:
        learned: What it was to import.
        path: The file that this came from.
        hidden: The modules.
        roots: Those that nothing but the script asked for.
        said: What the import of a root printed on stdout and on stderr.
    """

    learned: Learned
    path: Path
    hidden: HiddenModules
    roots: list[str] = field(default_factory=list)
    said: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)


class ForkedStart(Start):
    """A rank that forked from a template.

    Args:
        ready: What the template has imported.
        parent: The process that asked for the rank.
        at_exit: Registers what is called last when the process ends. Returns whether it is last of all.
    """

    def __init__(self, ready: Ready, parent: int, at_exit: Callable[[Callable[[], None]], bool]) -> None:
        super().__init__()
        self.parent = parent
        self._ready = ready
        self._outermost = OutermostImport()
        self._register = at_exit
        self._restart: Callable[[str], None] | None = None
        ready.hidden.appeared = self._appeared

    def at_exit(self, leave: Callable[[], None]) -> bool:
        """Call this after the handlers that the template's imports registered, as these were not yet registered."""
        atexit.register(self._ready.hidden.show_all)
        return self._register(leave)

    def begin(self, job: Job, restart: Callable[[str], None]) -> None:
        """From now on, imports that find something else than the template's start the rank again."""
        self._restart = self._ready.hidden.differs = restart

    def asked(self, name: str) -> bool:
        """Whether it is an import that the script asks for."""
        return self._outermost.begins(name)

    def imported(self, module: ModuleType) -> None:
        """Leave the collector as the import would have."""
        self._outermost.ends()
        if (wanted := self._ready.learned.counts.get(module.__name__)) is not None:
            set_counts(wanted)

    def cuda_begins(self) -> None:
        """See that nothing has been imported but what the script imports.

        A framework may change torch when it is imported. So a rank must have imported all of the template's, before
        anything is allocated. torch's own modules change nothing until they are used.
        """
        left = self._ready.hidden.left(self._ready.roots)
        if others := [name for name in left if name.partition(".")[0] not in (*TORCH, "fakedist")]:
            tops = {name.partition(".")[0] for name in others}
            self._write([name for name in self._ready.learned.modules if name.partition(".")[0] not in tops])
            assert self._restart is not None
            self._restart(f"import {others[0]}")

    def over(self) -> None:
        """Have the next template import what this rank imported besides, if that is much."""
        known = set(self._ready.learned.modules)
        more = [name for name in installed_modules(self._ready.hidden.others) if name not in known]
        more = [name for name in more if name.partition(".")[0] in TORCH]
        if len(more) >= _WORTH_ANOTHER:
            self._write([*self._ready.learned.modules, *more])

    def _write(self, names: list[str]) -> None:
        with suppress(OSError):
            write_learned(self._ready.path, replace(self._ready.learned, modules=names))

    def _appeared(self, name: str) -> None:
        _seed(name)
        for number, text in enumerate(self._ready.said.get(name, ()), 1):
            if text:
                sys.stdout.flush()
                os.write(number, text)


def _seed(name: str) -> None:
    """Seed a generator as its import does, which is different in each process."""
    module: Any = sys.modules[name]
    if name == "torch":
        module.default_generator.seed()
    elif name == "numpy.random":
        module.seed()
