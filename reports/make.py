"""Make the gallery again: run each job, write its page here, and README.md.

    python reports/make.py [NAME ...]

The jobs are those of examples/, run from a folder of their own, so that no page tells where this repository lies. On
two cores and the virtual GPU it takes three minutes and 3 GB.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fakedist.units import format_bytes  # noqa: E402

HERE = ROOT / "reports"


@dataclass(frozen=True)
class Job:
    """One page of the gallery.

    Attributes:
        name: Of the page.
        title: What it is.
        world_size: Ranks in the job.
        command: Script and arguments.
        look: What a reader may look at first.
    """

    name: str
    title: str
    world_size: int
    command: str
    look: str


JOBS = (
    Job(
        "llama-70b-1024",
        "Llama 3 70B, FSDP2 and tensor parallelism of 8, full checkpointing",
        1_024,
        "examples/llama_fsdp2.py --model 70b --tp 8 --checkpoint full",
        "the peak is no layer's: three blocks of the loss, each with all 128,256 words",
    ),
    Job(
        "llama-70b-1024-loss-parallel",
        "the same with the loss sharded over the vocabulary",
        1_024,
        "examples/llama_fsdp2.py --model 70b --tp 8 --checkpoint full --loss-parallel",
        "what the advice of the page above came to",
    ),
    Job(
        "llama-405b-16384",
        "Llama 3 405B, FSDP2 and tensor parallelism of 8, full checkpointing",
        16_384,
        "examples/llama_fsdp2.py --model 405b --tp 8 --checkpoint full",
        "126 blocks folded into one row; groups of 8 and of 2,048 ranks",
    ),
    Job(
        "gpt2-xl-ddp-64",
        "GPT-2 XL, DistributedDataParallel, bfloat16 autocast, four accumulated batches",
        64,
        "examples/ddp_gpt.py --model gpt2-xl",
        "the same optimizer state on all 64 ranks, and what sharding it would give",
    ),
)

_INTRODUCTION = """# Gallery

Reports that fakedist made of well-known jobs, each of rank 0, on a machine without a GPU. A page is one file that needs
nothing else: download it and open it in a browser. `make gallery` makes them all again.

| page | world | peak | | look at |
|---|---:|---:|---|---|
"""


def profile(job: Job, folder: Path) -> dict[str, Any]:
    """Run a job, keep its page, and give its figures."""
    command = f"profile --world-size {job.world_size} --rank 0 --force --output {job.name} --json {job.command}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GIT_CEILING_DIRECTORIES": str(folder)}
    finished = subprocess.run(
        [sys.executable, "-m", "fakedist", *shlex.split(command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode not in (0, 4):
        raise SystemExit(f"{finished.stderr[-3_000:]}\nexit {finished.returncode}: {command}")
    shutil.copy(folder / job.name / "report.html", HERE / f"{job.name}.html")
    found = json.loads(finished.stdout)
    assert isinstance(found, dict)
    return found


def row(job: Job, found: dict[str, Any]) -> str:
    """A job's line in README.md."""
    capacity = format_bytes(found["capacity_bytes"])
    fits = f"fits {capacity}" if found["fits"] else f"does not fit {capacity}"
    peak = format_bytes(found["peak_allocated_bytes"])
    return f"| [{job.title}]({job.name}.html) | {job.world_size:,} | {peak} | {fits} | {job.look} |"


def command_text(job: Job) -> str:
    """What a reader types for the same page."""
    return f"fakedist profile --world-size {job.world_size} --rank 0 {job.command}"


def main() -> None:
    """Make the pages, or those that are named; README.md only with all of them."""
    chosen = [job for job in JOBS if job.name in sys.argv[1:]] or list(JOBS)
    folder = Path(tempfile.gettempdir()) / "fakedist-gallery"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "examples", folder / "examples")
    rows = []
    for job in chosen:
        rows.append(row(job, profile(job, folder)))
        print(rows[-1], flush=True)
    shutil.rmtree(folder)
    if len(chosen) == len(JOBS):
        commands = "\n".join(map(command_text, JOBS))
        text = "\n".join(rows) + "\n\nTheir commands, in this order:\n\n```\n" + commands + "\n```\n"
        (HERE / "README.md").write_text(_INTRODUCTION + text)


if __name__ == "__main__":
    main()
