"""The programs of a task's process, and of the server that such processes fork from.

They are started by the path of this file. So all run the same fakedist, even from a bare clone, and nothing next to the
script can shadow it.
"""

from __future__ import annotations

import sys

_ROOT = __file__.rsplit("/", 3)[0]
if sys.flags.safe_path:
    sys.path.insert(0, _ROOT)
else:
    sys.path[0] = _ROOT


def run(path: str) -> int:
    """Run the task of a file."""
    from fakedist.cli.program import Program

    program = Program()
    from fakedist.cli.job_file import run_job_file

    return program.run(lambda: run_job_file(path))


def fork(page: str, gpu: str, door: str) -> int:
    """Be a fork server of tasks, and in each fork run the task."""
    import gc
    import os
    import signal
    import socket
    from pathlib import Path

    from fakedist.cli.program import Program

    program = Program()
    from fakedist.cli.job_file import run_job_file
    from fakedist.launcher.fork_servers import RankDoor, import_ahead
    from fakedist.rank.fork_server import can_fork, end_with_parent, serve

    end_with_parent(signal.SIGKILL)
    import_ahead(page == "page", gpu)
    gc.collect()
    gc.freeze()
    task, doors = serve(socket.socket(fileno=int(door)), serves=can_fork())
    if task["ranks"]:
        os.environ.update(RankDoor(Path(task["ranks"]), doors[0] if doors else None).variable())
    (path,) = task["arguments"]
    return program.run(lambda: run_job_file(path))


if __name__ == "__main__":
    sys.exit(run(sys.argv[2]) if sys.argv[1] == "run" else fork(*sys.argv[2:]))
