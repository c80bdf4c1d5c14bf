"""The host's clock of a run against a run without fakedist's recorder: the host's time of a step.

    python bench/host_clock.py [--rounds 1] [--only NAME] [--megatron-python PYTHON]

Five jobs, both sides in turns, in processes of their own; on two quiet cores a round takes under five minutes. A
profiled run gives the sum over the timed step's launches, as the table ``launches`` has them. The bare run has the
virtual GPU and the faked groups alone; an optimizer hook reads the CPU time of the process. The time in the groups'
calls is left out, and that in the driver's, and pauses for garbage collection, as on the clock. A core's speed changes
from moment to moment, so the machine's score is taken between the steps, as in a profiled run; the ratio is of mean
steps over the least score, in all rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fakedist.gpu.models.catalogue import find_gpu  # noqa: E402
from fakedist.gpu.virtual import virtual_gpu  # noqa: E402
from fakedist.options import Job  # noqa: E402
from fakedist.units import UNLIMITED_BYTES  # noqa: E402

#: Steps of a bare run: the first ones warm up.
WARM_UP, STEPS = 5, 12


@dataclass(frozen=True)
class Example:
    """A job: its name, the number of ranks, the script and its flags."""

    name: str
    world_size: int
    script: str
    flags: str = ""


JOBS = [
    Example("GPT-2, DDP", 8, "examples/ddp_gpt.py", "--model gpt2 --batch-size 1 --accumulate 1 --steps 1000"),
    Example(
        "Llama, FSDP2 and TP", 16, "examples/llama_fsdp2.py", "--model 8b --num-layers 4 --tp 2 --steps 1000"
    ),
    Example("TP, PP and DP by hand", 8, "examples/three_d.py", "--tp 2 --pp 2 --dp 2 --layers 8 --steps 1000"),
    Example(
        "Megatron-core", 8, "examples/megatron_gpt.py",
        "--tensor-model-parallel-size 2 --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
        "--max-position-embeddings 512 --lr 1e-4 --micro-batch-size 1 --global-batch-size 4 --train-iters 1000 "
        "--exit-interval 1000 --bf16 --use-distributed-optimizer --no-check-for-nan-in-loss-and-grad",
    ),
    Example("compiled GPT", 1, "bench/jobs/compiled_gpt.py"),
]  # fmt: skip


@dataclass(frozen=True)
class Side:
    """A step of the host in milliseconds, the machine's score between steps in microseconds, and the clock's bound."""

    ms: float
    score_us: float
    bound_ms: float = 0.0

    @property
    def for_score(self) -> float:
        """The step in forwards of ``Linear``."""
        return self.ms * 1e3 / self.score_us


def mean_side(rounds: Sequence[Side]) -> Side:
    """The mean step of all rounds, the least score and the greatest bound."""
    steps_ms, scores_us, bounds_ms = zip(*((side.ms, side.score_us, side.bound_ms) for side in rounds), strict=True)
    return Side(fmean(steps_ms), min(scores_us), max(bounds_ms))


def profiled(python: str, job: Example) -> Side:
    """The sum of a profiled run's launches."""
    with tempfile.TemporaryDirectory() as directory:
        options = [
            "--world-size",
            str(job.world_size),
            "--rank",
            "0",
            "--device",
            "virtual",
            "--no-page",
            "--gpu-memory",
            "unlimited",
            "-o",
            f"{directory}/run",
        ]
        command = [python, "-m", "fakedist", "profile", *options, str(ROOT / job.script), *job.flags.split()]
        _run(command)
        read = (
            "import sys, json, array; from pathlib import Path\n"
            "from fakedist.analysis.recording import read_recording\n"
            "clock = read_recording(Path(sys.argv[1])).host_clock\n"
            "us = sum(t for t in array.array('d', clock.dispatch_us) if t == t)\n"
            "print(json.dumps([us / 1e3, clock.linear_us, clock.bound_us / 1e3]))"
        )
        return Side(*json.loads(_run([python, "-c", read, f"{directory}/run"]).splitlines()[-1]))


def bare(python: str, job: Example) -> Side:
    """The mean step of a bare run: CPU time, without the groups' calls, the driver's, and collections."""
    command = [python, __file__, "--bare", str(job.world_size), str(ROOT / job.script), *job.flags.split()]
    lines = [line for line in _run(command).splitlines() if line.startswith("[[")]
    if not lines:
        raise SystemExit(f"{job.name}: the bare run ended before it had {WARM_UP + STEPS} steps of an optimizer")
    steps_ms, scores_us = json.loads(lines[0])
    return Side(fmean(steps_ms), min(scores_us))


def _run(command: list[str]) -> str:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"exit {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


class Stopwatch:
    """CPU time of the process without the driver's. It stands still from ``stop`` to ``go``, which may nest."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._library = library
        self._left_out_ns = self._begun_ns = self._depth = 0

    def _now_ns(self) -> int:
        return time.process_time_ns() - (time.monotonic_ns() - int(self._library.fakedist_clock_ns()))

    @property
    def read_ns(self) -> int:
        """The time at which it was stopped."""
        return self._begun_ns - self._left_out_ns

    def stop(self) -> None:
        """Stand still."""
        self._depth += 1
        self._begun_ns = self._now_ns() if self._depth == 1 else self._begun_ns

    def go(self, _: int) -> None:
        """Go on."""
        self._depth -= 1
        self._left_out_ns += 0 if self._depth else self._now_ns() - self._begun_ns

    def collects(self, phase: str, _: object) -> None:
        """Stand still while Python collects garbage: a function for ``gc.callbacks``."""
        self.stop() if phase == "start" else self.go(0)


def run_bare(world_size: int, script: str, flags: list[str]) -> None:
    """Run a script on the virtual GPU among faked ranks, and print its steady steps: milliseconds, and scores."""
    with virtual_gpu(find_gpu("h100-80g"), min(world_size, 8), UNLIMITED_BYTES):
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from fakedist.gpu.driver_clock import DriverClock
        from fakedist.gpu.values.engine import ValueEngine
        from fakedist.rank.frameworks.adapting import adapted_frameworks
        from fakedist.record.dispatch import every_operation
        from fakedist.record.machine_score import linear_over_pace
        from fakedist.world.environ import rank_environment
        from fakedist.world.process_group import still_calls
        from fakedist.world.reroute import fake_world

        job = Job(world_size=world_size, rank=0, target=script)
        os.environ.update(rank_environment(job))
        engine, set_up, calls = ValueEngine(0), ExitStack(), ExitStack()
        library, ones = ctypes.PyDLL(None), [torch.ones((), dtype=dtype) for dtype in (torch.float32, torch.bool)]
        library.fakedist_clock_ns.restype = ctypes.c_uint64
        answers = (ctypes.c_uint64 * 4)(
            *(word for one in ones for word in (one.nbytes, one.data_ptr()))
        )  # each read: 1
        watch, ends, pace_us = Stopwatch(library), list[tuple[int, float]](), DriverClock().pace_us

        def stepped(*_: object) -> None:
            watch.stop()
            if not ends:
                set_up.close()
                calls.enter_context(still_calls(watch.stop, watch.go))
                gc.callbacks.append(watch.collects)
                library.fakedist_answer_reads(answers, len(ones))
                library.fakedist_clock(1, ctypes.c_uint64(0))
            ends.append((watch.read_ns, linear_over_pace(pace_us) * pace_us()))
            if len(ends) > WARM_UP + STEPS:
                at_ns, scores_us = zip(*ends[WARM_UP:], strict=True)
                steps_ms = [(end - begin) / 1e6 for begin, end in itertools.pairwise(at_ns)]
                print("\n" + json.dumps([steps_ms, scores_us]), flush=True)  # Megatron's own lines may be open
                os._exit(0)
            watch.go(0)

        register_optimizer_step_post_hook(stepped)
        sys.argv = [script, *flags]
        # Not beside the script: this folder has a megatron.py.
        sys.path[:] = [str(Path(script).parent), *(path for path in sys.path if Path(path) != Path(__file__).parent)]
        with fake_world(job, None, engine.is_undefined), adapted_frameworks(), calls:
            set_up.enter_context(engine.below_dispatch())  # models compare what they read in their first step
            set_up.enter_context(every_operation(engine.execute))
            runpy.run_path(script, run_name="__main__")


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--bare"]:
        run_bare(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="jobs with this in their name")
    parser.add_argument("--megatron-python", default=sys.executable, help="a Python that has megatron-core")
    arguments = parser.parse_args()
    print(f"{'job':<22} {'bare':>10} {'score':>9} {'clock':>11} {'score':>9} {'ratio':>6} {'bound':>10}")
    for job in JOBS:
        if arguments.only not in job.name:
            continue
        python = arguments.megatron_python if "megatron" in job.script else sys.executable
        if (
            "megatron" in job.script
            and subprocess.run([python, "-c", "import megatron.core"], capture_output=True).returncode
        ):
            print(f"{job.name:<22} not run: {python} has none (make frameworks, or --megatron-python)", flush=True)
            continue
        rounds = [(bare(python, job), profiled(python, job)) for _ in range(arguments.rounds)]
        own, clock = map(mean_side, zip(*rounds, strict=True))
        print(
            f"{job.name:<22} {own.ms:7.2f} ms {own.score_us:6.2f} us {clock.ms:8.2f} ms {clock.score_us:6.2f} us "
            f"{clock.for_score / own.for_score:6.2f} {clock.bound_ms:7.3f} ms",
            flush=True,
        )
    print("load average of the last minute, at the end: " + f"{os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
