"""Makes the executor that ``--on`` and ``--jobs`` name."""

from __future__ import annotations

from collections.abc import Callable

from fakedist.errors import JobError
from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.task import Executor

#: The values of ``--on``.
HERE, RAY = "local", "ray"


def make_executor(on: str, jobs: int | None, say: Callable[[str], None], *, cold: bool = False) -> Executor:
    """Make an executor.

    Args:
        on: "local", "ray" (the cluster of RAY_ADDRESS or of this machine) or "ray://HOST:PORT".
        jobs: Tasks that run at once on this machine. None chooses by cores and memory.
        cold: Whether each rank starts on its own, as always on a cluster.

    Raises:
        JobError: There is no such place, or ``jobs`` is given for a cluster.
        SetupError: Ray is not installed, or no cluster answers.
    """
    if on == HERE:
        return LocalExecutor(jobs, cold=cold)
    if on != RAY and not on.startswith("ray://"):
        raise JobError(f"--on {on}: there is no such place", f"--on {HERE}, --on {RAY} or --on ray://HOST:10001")
    if jobs is not None:
        raise JobError("--jobs is for this machine, and the cluster runs as many as fit it", "leave out --jobs")
    from fakedist.launcher.executors.ray_cluster import RayExecutor

    return RayExecutor(None if on == RAY else on, say)
