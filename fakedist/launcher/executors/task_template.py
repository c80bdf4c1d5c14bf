"""The task template: a process that has imported what makes tables, and from which the processes of tasks fork.

This is the supervisor's half, and needs the standard library alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from fakedist.launcher.keeping import ForkedChild, Template

#: Arrow's allocator would start a thread, and none may be missing in a fork.
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}


class TaskTemplate(Template):
    """There is one template, from the second task on: the first may be the only one.

    If the template ends, tasks start on their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_tasks = 0
        self._environment: dict[str, str] = {}

    def fork(self, program: Sequence[str], task: dict[str, Any], files: Sequence[int]) -> ForkedChild | None:
        """Fork the process of a task. None if it has to start on its own.

        Args:
            program: The template's program and arguments, to which the descriptor of its door is added.
            task: The ``arguments`` of its program, its ``environment`` and ``cwd``, and ``learned``: the file of the
                template of its ranks, empty if they start on their own.
            files: The descriptors for its streams; that of the door to a template of ranks, if there is one.
        """
        self._num_tasks += 1
        if self._num_tasks == 2:
            self._environment = task["environment"]
            with suppress(OSError):  # no memory, or no process more
                self.start(program, self._environment | _NO_THREADS, task["cwd"], sys.stderr.fileno())
        if self._door is None or task["environment"] != self._environment:
            return None
        if (forked := ForkedChild.ask(self._door.fileno(), task, files)) is None:
            self.close()  # something cannot be imported, or starts threads
        return forked
