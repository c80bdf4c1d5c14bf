"""CPU seconds of one more point of a sweep: of ranks that fork from a server, and of ranks that start on their own.

python bench/points.py
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

from fakedist.launcher.executors.local import LocalExecutor
from fakedist.launcher.executors.task import Task
from fakedist.options import Job

ROOT = Path(__file__).parent.parent
LLAMA = str(ROOT / "examples" / "llama_fsdp2.py")
#: Script and arguments of each.
POINTS = {
    "one tensor": ("one_tensor.py", ()),
    "llama_fsdp2.py, 2 layers, tp 4": (LLAMA, ("--num-layers=2", "--tp=4")),
}


def cpu_s() -> float:
    """CPU seconds of all processes that have ended and that this one waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def points_cpu_s(script: str, arguments: tuple[str, ...], *, number: int, cold: bool) -> float:
    """CPU seconds of a number of equal points, one after the other."""
    before = cpu_s()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "one_tensor.py").write_text("import torch; torch.ones(3, device='cuda')")
        job = Job(world_size=8, rank=0, target=script, arguments=arguments, device="virtual", page=False)
        executor = LocalExecutor(1, cold=cold)
        tasks = (Task(key=str(each), job=job, directory=directory / str(each), cwd=directory) for each in range(number))
        failed = [result.output for result in executor.run(tasks) if not result.ended_well]
        executor.close()
    assert not failed, failed
    return cpu_s() - before


def main() -> None:
    """Print one line a script. The first point starts on its own, and the server before the second."""
    for name, (script, arguments) in POINTS.items():
        cold = points_cpu_s(script, arguments, number=1, cold=True)
        cold = (points_cpu_s(script, arguments, number=3, cold=True) - cold) / 2
        two = points_cpu_s(script, arguments, number=2, cold=False)
        forked = (points_cpu_s(script, arguments, number=4, cold=False) - two) / 2
        print(
            f"{name:<32} {cold:6.2f} s of CPU --cold {forked:6.2f} s from the server {cold / forked:5.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
