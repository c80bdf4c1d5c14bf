"""The programs of an executor's processes: a supervisor, a task, and a template of tasks.

They are started by the path of this file. So all run the same fakedist, even from a bare clone, and nothing next to the
script can shadow it.
"""

from __future__ import annotations

import sys

_ROOT = __file__.rsplit("/", 4)[0]
if sys.flags.safe_path:
    sys.path.insert(0, _ROOT)
else:
    sys.path[0] = _ROOT

from collections.abc import Callable  # noqa: E402


def supervise(learned: str) -> int:
    """Run the orders on stdin, see :mod:`fakedist.launcher.executors.supervising`."""
    from fakedist.launcher.executors.supervising import main

    return main(learned)


def run(path: str) -> int:
    """Run the task of a file."""
    from fakedist.cli.program import Program

    program = Program()
    from fakedist.cli.job_file import run_job_file

    return program.run(lambda: run_job_file(path))


def fork(page: str, gpu: str, door: str) -> int:
    """Be a template of tasks, and in each fork run the task."""
    import gc
    import os
    import signal
    import socket
    from pathlib import Path

    from fakedist.cli.program import Program

    program = Program()
    from fakedist.cli.job_file import run_job_file
    from fakedist.launcher.ahead import import_ahead
    from fakedist.launcher.keeping import template_variable
    from fakedist.rank.fork_server import can_fork, end_with_parent, serve

    end_with_parent(signal.SIGKILL)
    import_ahead(page == "page", gpu)
    gc.collect()
    gc.freeze()
    task, doors = serve(socket.socket(fileno=int(door)), serves=can_fork())
    if task["learned"]:
        os.environ.update(template_variable(Path(task["learned"]), doors[0] if doors else None))
    (path,) = task["arguments"]
    return program.run(lambda: run_job_file(path))


if __name__ == "__main__":
    _programs: dict[str, Callable[..., int]] = {"supervise": supervise, "run": run, "fork": fork}
    sys.exit(_programs[sys.argv[1]](*sys.argv[2:]))
