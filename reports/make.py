"""Make the gallery again: run each job, write its page here, and README.md.

    python reports/make.py [NAME ...]

The jobs are those of examples/, run from a folder of their own, so that no page tells where this repository lies. On
two cores and the virtual GPU it takes three minutes and 3 GB.
"""

from __future__ import annotations

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
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
        "the loss is gone from the peak; what the advice of the page above was about",
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

#: The jobs that stand side by side on one page.
COMPARED = ("llama-70b-1024", "llama-70b-1024-loss-parallel")

_INTRODUCTION = """# Gallery

Reports that fakedist made of well-known jobs, each of rank 0, on a machine without a GPU. A page is one file that needs
nothing else: download it and open it in a browser. `make gallery` makes them all again.

| page | world | peak | | look at |
|---|---:|---:|---|---|
"""


def profile(job: Job, folder: Path) -> None:
    """Run a job and keep its page."""
    command = f"profile --world-size {job.world_size} --rank 0 --force --output {job.name} --json {job.command}"
    finished = subprocess.run(
        [sys.executable, "-m", "fakedist", *shlex.split(command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GIT_CEILING_DIRECTORIES": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode not in (0, 4):
        raise SystemExit(f"{finished.stderr[-3_000:]}\nexit {finished.returncode}: {command}")
    shutil.copy(folder / job.name / "report.html", HERE / f"{job.name}.html")


def compare(folder: Path) -> None:
    """Put two runs side by side on a page, if both were made."""
    if all((folder / name).exists() for name in COMPARED):
        page = HERE / f"{COMPARED[0]}-compared.html"
        command = [sys.executable, "-m", "fakedist", "compare", *COMPARED, "--html", str(page)]
        subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL
        )


def compared_text() -> str:
    """What README.md says of that page."""
    page = f"{COMPARED[0]}-compared.html"
    why = re.search(r"<h1>(.+?)</h1>", (HERE / page).read_text())
    assert why is not None
    return f"""[The first two side by side]({page}), from `fakedist compare {" ".join(COMPARED)} --html FILE`:

> {html.unescape(why[1]).replace("_", chr(92) + "_")}

[baselines](baselines) is what our own examples take; `make budgets` holds them to it ([memory in CI](../docs/ci.md)).
"""


def row(job: Job) -> str:
    """A job's line in README.md, with the figures of its page."""
    page = (HERE / f"{job.name}.html").read_text()
    peak, capacity = (_figure(page, name) for name in ("peak_allocated", "capacity"))
    fits = "does not fit" if "pill no" in page else "fits"
    return f"| [{job.title}]({job.name}.html) | {job.world_size:,} | {peak} | {fits} {capacity} | {job.look} |"


def _figure(page: str, name: str) -> str:
    found = re.search(f'data-figure="{name}">([^<]+)<', page)
    assert found is not None, name
    return found[1]


def command_text(job: Job) -> str:
    """What a reader types for the same page."""
    return f"fakedist profile --world-size {job.world_size} --rank 0 {job.command}"


def main() -> None:
    """Make the pages, or those that are named, and README.md."""
    folder = Path(tempfile.gettempdir()) / "fakedist-gallery"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for job in [job for job in JOBS if job.name in sys.argv[1:]] or JOBS:
        profile(job, folder)
        print(row(job), flush=True)
    compare(folder)
    shutil.rmtree(folder)
    commands = "\n".join(map(command_text, JOBS))
    rows = "\n".join(map(row, JOBS))
    (HERE / "README.md").write_text(
        f"{_INTRODUCTION}{rows}\n\nTheir commands, in this order:\n\n```\n{commands}\n```\n\n{compared_text()}"
    )


if __name__ == "__main__":
    main()
