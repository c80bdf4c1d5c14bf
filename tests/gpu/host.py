"""Steps as long as they take without fakedist, estimated on the same machine; and what CUDA's calls take its host."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fakedist.extras.confirm.pieces import (
    ROOT,
    TIME_IS_OVER,
    ScriptFailedError,
    Session,
    ended_with,
    job_environment,
    run_script,
)

_MEGATRON = (
    "examples/megatron_gpt.py --num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 "
    "--max-position-embeddings 512 --lr 1e-4 --micro-batch-size 1 --global-batch-size 4 --train-iters 1000 "
    "--exit-interval 1000 --bf16 --use-distributed-optimizer --no-check-for-nan-in-loss-and-grad"
)
#: Scripts of one rank that train for more steps than are looked at.
JOBS = {
    "GPT-2, DDP, 1 sequence": "examples/ddp_gpt.py --model gpt2 --batch-size 1 --accumulate 1 --steps 1000",
    "GPT-2, DDP, 8 sequences": "examples/ddp_gpt.py --model gpt2 --batch-size 8 --accumulate 1 --steps 1000",
    "Llama of 2 layers, FSDP2, 512 tokens": "examples/llama_fsdp2.py --model 8b --num-layers 2 --tp 1 --seq-len 512 "
    "--steps 1000",
    "Llama of 2 layers, FSDP2, 8,192 tokens": "examples/llama_fsdp2.py --model 8b --num-layers 2 --tp 1 --steps 1000",
    "GPT of 8 small layers by hand": "examples/three_d.py --layers 8 --hidden 512 --heads 8 --seq-len 256 --batch 4 "
    "--steps 1000",
    "experts without drops": "tests/gpu/many_steps.py moe_dropless",
    "compiled GPT": "bench/jobs/compiled_gpt.py",
    "Megatron-core GPT": _MEGATRON,
    "Megatron-core experts": f"{_MEGATRON} --num-experts 8 --moe-router-topk 2 --swiglu --disable-bias-linear",
}
#: Cores that a job on the virtual GPU gets: its threads, and those of another job, must not wait for one.
_CORES = 3
#: The longest of these processes, the estimate of Megatron-core's experts, has 30 s of CPU time. On a machine that also
#: runs tests it took five times that, and a limit of 120 s cut it off.
_ALONE_S, _BUSY = 30.0, 10


def run(session: Session) -> bool:
    """Time the calls and the jobs; whether each has times on both sides."""
    went_well = _calls(session)
    jobs = [job for job in JOBS if "Megatron" not in job or find_spec("megatron")]
    session.say(*(f"{job}: not run: megatron is not installed" for job in JOBS if job not in jobs))
    rows, failed = [], []
    # The virtual GPU needs no real one; several processes share nothing but the processor.
    with (
        tempfile.TemporaryDirectory(prefix="gpu-host-") as text,
        ThreadPoolExecutor(max(1, session.at_once // _CORES)) as pool,
    ):
        numbered = [(job, Path(text, f"job-{number}")) for number, job in enumerate(jobs)]
        estimated = [pool.submit(_in_time, session, _estimated, *each) for each in numbered]
        measured = [_in_time(session, _measured, *each) for each in numbered]
        for job, *sides in zip(jobs, measured, (each.result() for each in estimated), strict=True):
            failed += [f"{job}: {side}" for side in sides if isinstance(side, str)]
            if not any(isinstance(side, str) for side in sides):
                rows.append({"job": job} | {key: value for side in sides for key, value in dict(side).items()})
                session.say(json.dumps(rows[-1]))
    session.write("gpu-steps", rows, failed)
    return not failed and went_well


def _in_time(
    session: Session, work: Callable[[Session, str, Path], dict[str, Any]], job: str, directory: Path
) -> dict[str, Any] | str:
    try:
        return TIME_IS_OVER if session.is_over else work(session, job, directory)
    except ScriptFailedError as error:
        return str(error)


def _measured(session: Session, job: str, directory: Path) -> dict[str, Any]:
    """Median of the windows, their spread, and for how long the device was behind the host at a window's end."""
    if session.rehearsal:
        return {"step_us": 0.0, "spread": 0.0, "behind_us": 0.0}  # the virtual GPU takes no time
    result = directory.with_suffix(".json")
    _output(session, str(ROOT / "tests" / "gpu" / "step_time.py"), str(result), *_script(job))
    windows = json.loads(result.read_text())
    steps = [each["step_us"] for each in windows]
    return {
        "step_us": statistics.median(steps),
        "spread": max(steps) / min(steps) - 1,
        "behind_us": statistics.median(each["behind_us"] for each in windows),
    }


def _estimated(session: Session, job: str, directory: Path) -> dict[str, Any]:
    """The step estimated for this machine as the host, and for the usual host of its GPU."""
    world = ("--world-size", "1", "--rank", "0", *session.virtual.device_options, "--host", "this", "--no-page")
    _output(session, "-m", "fakedist", "profile", *world, "-o", str(directory), *_script(job))
    found: dict[str, Any] = {}
    for prefix, host in (("this", "this"), ("usual", "dgx-h100")):
        shown = _output(session, "-m", "fakedist", "time", str(directory), "--host", host, "--json")
        time = json.loads(shown)["time"]
        found |= {f"{prefix}_us": time["step_us"], f"{prefix}_low_us": time["step_low_us"]}
        found |= {f"{prefix}_high_us": time["step_high_us"]}
    return found | {"kernels_us": time["kernel_us"], "num_kernels": time["num_kernels"]}


def _script(job: str) -> list[str]:
    path, *arguments = JOBS[job].split()
    return [str(ROOT / path), *arguments]


def _output(session: Session, *arguments: str) -> str:
    """Run Python with these arguments; what it printed.

    Raises:
        ScriptFailedError: It did not end well.
    """
    environment = job_environment(None, profiled=False)
    ended = ended_with(arguments, session.timeout_s(_ALONE_S * _BUSY), environment=environment)
    if ended.why:
        raise ScriptFailedError(f"it {ended.why}")
    return ended.output


def _calls(session: Session) -> bool:
    """One side after the other: they would slow each other down."""
    try:
        real, virtual = (
            {row["operation"]: row for row in run_script(session, way, "tests.gpu.call_times")}
            for way in (session.real, session.virtual)
        )
    except ScriptFailedError as error:
        session.write("gpu-calls", [], [str(error)])
        return False
    rows = [
        {"operation": name, "real_us": row["least_us"], "real_median_us": row["median_us"]}
        | {"virtual_us": virtual[name]["least_us"] if name in virtual else None}
        for name, row in real.items()
    ]
    for row in rows:
        session.say(json.dumps(row))
    session.write("gpu-calls", rows)
    return True
