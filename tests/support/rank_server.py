"""Ranks of tests' commands, which fork from a process that has imported torch.

A sweep's server (``fakedist.rank.preloading``) serves one script, whose first rank it has seen. This one serves every
script that imports torch itself and sets no variable of its environment.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))

from fakedist.launcher.fork_servers import ForkedChild, ForkServer, RankDoor  # noqa: E402
from fakedist.options import Job  # noqa: E402
from fakedist.rank.preloading import ForkedRank, Imports, Start, forked_rank  # noqa: E402

#: What optimizers, and the wrappers of most jobs, import.
_MODULES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel")
#: A script that looks for modules, or sets variables: torch reads some while it is imported.
_SEES_THE_START = re.compile(r"sys\.modules|environ(\[[^]]*\]\s*=[^=]|\s*\|=|\.(update|setdefault|pop)\b)|putenv")


class AnyScriptServer(ForkServer):
    """The process that ranks fork from."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "imports.json"
        own = {**environment}
        Imports("", own, _ROOT, own, [*sys.path], [*_MODULES], [], [], {}).write(path)
        self.start([sys.executable, __file__, str(path)], environment, _ROOT, sys.stderr.fileno())

    def doors(self) -> tuple[int, ...]:
        """The descriptor to ask for a rank; none once the server has ended."""
        return () if self._door is None else (self._door.fileno(),)

    def close(self) -> None:
        """End it."""
        super().close()
        self._folder.cleanup()


def fork_ranks(descriptor: int) -> None:
    """Have ranks of this process and its tasks fork from the server behind the descriptor."""
    from fakedist.launcher import launching, ranks

    door = _AnyScriptDoor(Path(), descriptor)
    launching.Streams = functools.partial(launching.Streams, door=door)
    RankDoor.from_environment = lambda: door
    ranks.RankServer = lambda *_: _OpenServer(door)


class _OpenServer:
    """In place of a server that a run of several ranks would start with the imports of its first."""

    def __init__(self, door: RankDoor) -> None:
        self._door = door

    def door(self, key: str) -> RankDoor:
        return self._door

    def close(self) -> None:
        """The other one goes on."""


class _AnyScriptDoor(RankDoor):
    def fork(
        self, job: Job, run_directory: Path, environment: Mapping[str, str], *, stdout: int | None, pipe: int
    ) -> ForkedChild | None:
        script = "" if job.is_module else Path(job.target).read_text(errors="replace")
        imports_torch = "import torch" in script or "from torch" in script
        if (
            job.device != "virtual"
            or job.nsys
            or job.environment
            or not imports_torch
            or _SEES_THE_START.search(script)
        ):
            return None
        return self._ask(run_directory, environment, (0, 1 if stdout is None else stdout, 2, pipe))


class _OfAnyScript(Start):
    """The start of a forked rank that is compared with no first one."""

    def __init__(self, forked: ForkedRank) -> None:
        super().__init__()
        self._forked, self.parent = forked, forked.parent

    def at_exit(self, leave: Callable[[], None]) -> bool:
        return self._forked.at_exit(leave)

    def watched(self, restart: Callable[[str], None]) -> AbstractContextManager[None]:
        return self._forked.watched(lambda variable: None)


if __name__ == "__main__":
    from fakedist.rank.main import main

    _run_directory, _forked = forked_rank(*sys.argv[1:])
    assert isinstance(_forked, ForkedRank)
    sys.exit(main(_run_directory, _OfAnyScript(_forked)))
