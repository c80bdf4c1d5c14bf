"""Runs tasks on this machine, as many at once as its cores and free memory allow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from fakedist.launcher.executors.process import TaskProcesses
from fakedist.launcher.executors.task import Coming, Task, TaskResult
from fakedist.launcher.machine import free_memory_bytes, num_cores

#: Seconds after which tasks are asked for again, if none was ready.
_ASK_AGAIN_S = 0.2


class LocalExecutor:
    """Runs tasks in processes of this machine.

    ``jobs`` run at once; None chooses by cores and free memory, taking unknown needs from earlier tasks. Tasks on a
    real GPU run one by one, because they would take each other's memory and time. Unless ``cold``, ranks fork from a
    server, from the second on. ``processes`` run the tasks; ``free_memory`` returns the bytes left for them.
    """

    def __init__(
        self,
        jobs: int | None = None,
        *,
        cold: bool = False,
        processes: TaskProcesses | None = None,
        cores: int | None = None,
        free_memory: Callable[[], int] = free_memory_bytes,
    ) -> None:
        self._jobs = jobs
        self._cores = cores or num_cores()
        self._processes = processes or TaskProcesses(fork=not cold)
        self._free_memory = free_memory
        self._most_bytes: int | None = None

    def run(self, tasks: Iterable[Task | None]) -> Iterator[TaskResult]:
        """Run tasks and yield the result of each as it ends, see :class:`fakedist.launcher.executors.task.Executor`."""
        running: dict[Future[TaskResult], Task] = {}
        free_bytes = self._free_memory()
        coming = Coming(tasks)
        with ThreadPoolExecutor(self._jobs or self._cores) as pool:
            try:
                while True:
                    while len(running) < (self._jobs or self._cores):
                        task = coming.next()
                        if task is None or not self._has_room(task, running.values(), free_bytes):
                            break
                        running[pool.submit(self._processes.run, coming.take())] = task
                    if not running:
                        return
                    for future in wait(running, _ASK_AGAIN_S, return_when=FIRST_COMPLETED).done:
                        del running[future]
                        result = future.result()
                        self._most_bytes = max(self._most_bytes or 0, result.peak_rss_bytes)
                        yield result
            finally:
                if running:
                    self._processes.cancel()

    def close(self) -> None:
        """End what still runs, and start nothing more."""
        self._processes.cancel()

    def _has_room(self, task: Task, running: Collection[Task], free_bytes: int) -> bool:
        if not running:
            return True  # it may need less than it says, and nothing else would make room
        if any(task.job.device == "cuda" for task in (task, *running)):
            return False
        if self._jobs is not None:
            return True
        together = (task, *running)
        return (
            sum(task.need.cpus for task in together) <= self._cores
            and sum(task.need.booked_bytes(self._most_bytes) for task in together) <= free_bytes
        )
