"""``fakedist ...`` in a process that forks from one with pandas, pyarrow and plotly imported: a second of CPU less.

Its ranks fork from a process with torch imported (``tests.support.rank_server``), which saves five more. Sweeps run
their jobs the same way (``fakedist.cli.task_program``). With FAKEDIST_COLD=1 every process starts in a new interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.rank_server import AnyScriptServer, fork_ranks

if TYPE_CHECKING:
    from fakedist.cli.program import Program
    from fakedist.launcher.fork_servers import ForkedChild

#: For a run whose rank is to start in a new interpreter.
COLD = {"FAKEDIST_COLD": "1"}
#: Variables that no import reads.
_READ_LATE = {"COLUMNS", "FAKEDIST_HOST_CLOCK", "FAKEDIST_REHEARSE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


class Commands:
    """Runs commands. Those without variables of their own fork."""

    def __init__(self) -> None:
        from fakedist.launcher.fork_servers import TaskServer

        self._server = TaskServer()
        self._ranks: AnyScriptServer | None = None
        self._is_cold = COLD.items() <= os.environ.items()

    def run(
        self, arguments: Sequence[str], cwd: Path, environment: dict[str, str], variables: dict[str, str]
    ) -> tuple[int, str, str]:
        """Run ``fakedist`` with the arguments. Returns its exit code, stdout and stderr.

        Args:
            arguments: The command's words.
            cwd: The working directory.
            environment: The environment of all commands.
            variables: Further ones of this command.
        """
        task = {"arguments": [*arguments], "environment": {**environment}, "cwd": str(cwd), "variables": variables}
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, open(os.devnull) as stdin:
            files = stdin.fileno(), stdout.fileno(), stderr.fileno()
            may_fork = not self._is_cold and variables.keys() <= _READ_LATE
            if may_fork and arguments[0] in ("profile", "check"):
                self._ranks = self._ranks or AnyScriptServer(environment)
                files = (*files, *self._ranks.doors())
            forked = self._fork(task, files) if may_fork else None
            if forked is not None:
                code = forked.wait()
            else:
                words = [sys.executable, "-m", "fakedist", *arguments]
                own = environment | variables
                code = subprocess.run(words, cwd=cwd, env=own, stdin=stdin, stdout=stdout, stderr=stderr).returncode
            for file in (stdout, stderr):
                file.seek(0)
            return code, stdout.read().decode(), stderr.read().decode()

    def _fork(self, task: dict[str, Any], files: tuple[int, ...]) -> ForkedChild | None:
        """Fork, the first command too: a server of tasks leaves that one to start on its own."""
        program = [sys.executable, __file__]
        return self._server.fork(program, task, files) or self._server.fork(program, task, files)

    def close(self) -> None:
        """End the processes that they fork from."""
        self._server.close()
        if self._ranks is not None:
            self._ranks.close()


def _fork_tasks(program: Program) -> None:
    """Have this process's ``fakedist check`` run its tasks one by one, in forks of it."""
    from fakedist.cli.job_file import run_job_file
    from fakedist.launcher.executors import choosing
    from fakedist.launcher.executors.local import LocalExecutor
    from fakedist.launcher.executors.process import Order, Supervised, TaskProcesses

    class Forks(TaskProcesses):
        """Is its own supervisor."""

        @contextmanager
        def _supervisor(self) -> Iterator[Any]:
            yield self

        def ask(self, order: Order) -> bytes:
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    os.setsid()
                    log = os.open(order.log, os.O_WRONLY | os.O_CREAT)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    os.chdir(order.cwd)
                    code = program.run(lambda: run_job_file(order.arguments[0]))
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            return json.dumps(asdict(Supervised("itself", code, 0.0, 0))).encode()

    choosing.make_executor = lambda *_, **options: LocalExecutor(1, processes=Forks())


def _serve(door: str) -> int:
    """Be the process that commands fork from, and in each fork run one."""
    import gc
    import signal
    import socket

    from fakedist.cli.program import Program

    program = Program()
    import fakedist.__main__ as module
    from fakedist.cli import main
    from fakedist.launcher.fork_servers import import_ahead
    from fakedist.rank.fork_server import can_fork, end_with_parent, serve

    end_with_parent(signal.SIGKILL)
    import_ahead(page=True, gpu="h100-80g")  # of jobs without --gpu
    gc.collect()
    gc.freeze()
    command, doors = serve(socket.socket(fileno=int(door)), serves=can_fork())
    for descriptor in doors:
        fork_ranks(descriptor)
        if command["arguments"][0] == "check":
            _fork_tasks(program)
    os.environ.update(command["variables"])
    sys.path[0] = command["cwd"]
    sys.argv = [str(module.__file__), *command["arguments"]]
    return program.run(main)


if __name__ == "__main__":
    sys.exit(_serve(sys.argv[1]))
