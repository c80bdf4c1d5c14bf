"""Make the gallery again: run each job, write its page here, and README.md; then the pictures of docs/images/*.svg.

    python -m reports.make [NAME ...]

The jobs are those of examples/, run from a folder of their own, so that no page contains the path of this repository.
NAME is a job's or a tutorial's. On two cores and the virtual GPU all take twelve minutes and 3 GB. A job whose
packages are not installed keeps its page and is named at the end; README.md lists those packages.
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
from importlib.metadata import distributions
from pathlib import Path

from fakedist.report.content.comparison import comparison_report
from fakedist.report.content.run import run_report
from fakedist.report.page.assets import plotly_text
from fakedist.report.render.html import report_page
from fakedist.results.comparison import Comparison
from fakedist.results.opening import open_run
from reports.tutorials import IMAGES, TUTORIALS, draw_tutorial, terminal_svg

ROOT = Path(__file__).parent.parent
HERE = ROOT / "reports"
#: plotly.js, which all pages share.
PLOTLY = "plotly.min.js"


@dataclass(frozen=True)
class Job:
    """One page of the gallery.

    Attributes:
        name: Of the page.
        title: What it is.
        world_size: Ranks in the job.
        command: Script and arguments.
        look: What a reader may look at first.
        rank: The one that runs.
        needs: Packages that `make setup` does not install.
    """

    name: str
    title: str
    world_size: int
    command: str
    look: str
    rank: int = 0
    needs: tuple[str, ...] = ()


_MEGATRON = ("megatron-core", "transformer-engine-torch")

JOBS = (
    Job(
        "llama-70b-1024",
        "Llama 3 70B, FSDP2 and tensor parallelism of 8, full checkpointing",
        1_024,
        "examples/llama_fsdp2.py --model 70b --tp 8 --checkpoint full",
        "no layer makes the peak: it is three blocks of the loss, each with all 128,256 words",
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
    Job(
        "deepseek-v3-1024",
        "DeepSeek-V3: TP 2, PP 16, EP 64, latent attention, fp8 blockwise, a layout by hand",
        1_024,
        "examples/megatron_gpt.py --preset deepseek-v3",
        "the first of 16 stages: activations climb with each forward in flight, and stay a while",
        needs=_MEGATRON,
    ),
    Job(
        "qwen3-235b-256",
        "Qwen3-235B: TP 2, PP 8, EP 32, four stages on each rank",
        256,
        "examples/megatron_gpt.py --preset qwen3-235b",
        "39 of 55 GiB are activations of the forwards in flight on the first of 8 stages",
        needs=_MEGATRON,
    ),
    Job(
        "mixtral-8x7b-64",
        "Mixtral 8x7B: PP 4, EP 8, eight stages on each rank",
        64,
        "examples/megatron_gpt.py --preset mixtral-8x7b",
        "the largest blocks: flat buffers of gradients, each shared by the layers of its experts",
        needs=_MEGATRON,
    ),
    Job(
        "three-d-8-rank5",
        "tensor, pipeline and data parallelism on nothing but torch.distributed, rank 5",
        8,
        "examples/three_d.py --tp 2 --pp 2 --dp 2",
        "who a rank talks to on each of three axes, and when",
        rank=5,
    ),
    Job(
        "nonuniform-tp-8-rank4",
        "nonuniform tensor parallelism, a rank of the replica with fewer GPUs, rank 4",
        8,
        "examples/nonuniform_tp.py --tp 4 --dp 2 --reduced-tp 2",
        "two ranks do the work of four; ranks 6 and 7 are spare and leave during init, as their reports state",
        rank=4,
    ),
)

#: The jobs that stand side by side on one page.
COMPARED = ("llama-70b-1024", "llama-70b-1024-loss-parallel")

_INTRODUCTION = """# Gallery

fakedist's reports of well-known jobs, made on a machine without a GPU. They are of rank 0 unless the title names
another. GitHub shows the pages as source: open them on the [published site](../../../deployments/github-pages), or
download this folder and open one in a browser. The pages share `plotly.min.js`, which draws their charts, and fetch
nothing else. Your own reports are single files with that script inside. `make gallery` makes the pages again. The
[glossary](../docs/glossary.md) defines the terms.

| page | world | peak | | look at |
|---|---:|---:|---|---|
"""


def profile(job: Job, folder: Path) -> None:
    """Run a job and keep its page."""
    command = (
        f"profile --world-size {job.world_size} --rank {job.rank} --force --output {job.name} --json {job.command}"
    )
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
    if job.name == COMPARED[0]:
        (IMAGES / "card.svg").write_text(card(folder / job.name))
    page = report_page(run_report(folder / job.name), PLOTLY)
    (HERE / f"{job.name}.html").write_text(without_directory(page, folder))


def card(run: Path) -> str:
    """A picture of a run's card, as `repr` has it in a notebook."""
    rows = [line.strip().partition(": ") for line in repr(open_run(run)).splitlines()[1:]]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"\x1b[2m{name:<{width}}\x1b[0m  {text}" for name, _, text in rows]
    return terminal_svg(f'fakedist.open("{run.name}")', "\n".join(lines))


def draw_tutorials(folder: Path, names: list[str]) -> None:
    """Run the tutorials, or those that are named, for their pictures."""
    pages = sorted(TUTORIALS.glob("*.md"))
    for page in [page for page in pages if page.stem in names] if names else pages:
        draw_tutorial(page, folder / page.stem)
        print(f"docs/tutorials/{page.name}: run, pictures made", flush=True)


def without_directory(page: str, folder: Path) -> str:
    """A page that does not tell where it was made."""
    return re.sub(r"\s*<dt>in</dt><dd[^>]*>[^<]*</dd>", "", page).replace(f"{folder}/", "")


def compare(folder: Path) -> None:
    """Put two runs side by side on a page, if both were made."""
    a, b = (folder / name for name in COMPARED)
    if a.exists() and b.exists():
        page = report_page(comparison_report(Comparison(a, b)), plotly_file=PLOTLY)
        (HERE / f"{COMPARED[0]}-compared.html").write_text(page.replace(f"{folder}/", ""))


def compared_text() -> str:
    """The paragraph of README.md about that page."""
    page = f"{COMPARED[0]}-compared.html"
    why = re.search(r"<h1[^>]*>(.+?)</h1>", (HERE / page).read_text())
    assert why is not None
    return f"""[The first two side by side]({page}), from
`fakedist compare {" ".join(COMPARED)} --format html -o FILE`:

> {html.unescape(why[1]).replace("_", chr(92) + "_")}

[baselines](baselines) holds the memory of our own examples. `make budgets` checks them against it
([memory in CI](../docs/ci.md)).
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
    """The command with which a reader makes the same page."""
    return f"fakedist profile --world-size {job.world_size} --rank {job.rank} {job.command}"


def lacking(job: Job) -> list[str]:
    """Packages that a job needs and that are not installed."""
    return [name for name in job.needs if not any(distributions(name=name))]


def needs_text() -> str:
    """The paragraph of README.md about jobs that need more than `make setup` installs."""
    *named, last = (f"[{job.name}]({job.name}.html)" for job in JOBS if job.needs)
    return f"""{", ".join(named)} and {last}
need megatron-core and Transformer Engine, which `make setup` does not install (versions in
[docs/clients.md](../docs/clients.md)). Without them `make gallery` keeps their pages, and lists them at the end.

"""


def readme() -> str:
    """README.md, from the pages that are here."""
    commands = "\n".join(map(command_text, JOBS))
    rows = "\n".join(map(row, JOBS))
    told = f"Their commands, in the same order:\n\n```\n{commands}\n```"
    return f"{_INTRODUCTION}{rows}\n\n{pictures()}\n\n{told}\n\n{needs_text()}{compared_text()}"


def pictures() -> str:
    """The pictures of the jobs, two in a row, each with a link to its page."""
    cells = [
        f'<td width="50%"><a href="{name}.html"><img src="../docs/images/{name}.png" alt="{title}"></a></td>'
        for name, title in ((job.name, job.title) for job in JOBS)
        if name != COMPARED[1]
    ]
    rows = ("".join(cells[at : at + 2]) for at in range(0, len(cells), 2))
    return "\n".join(["<table>", *(f"<tr>{row}</tr>" for row in rows), "</table>"])


def main() -> None:
    """Make the pages, or those that are named, and README.md."""
    folder = Path(tempfile.gettempdir()) / "fakedist-gallery"
    shutil.rmtree(folder, ignore_errors=True)
    (HERE / PLOTLY).write_bytes(plotly_text())
    shutil.copytree(ROOT / "examples", folder / "examples")
    names, known = sys.argv[1:], [*(job.name for job in JOBS), *(page.stem for page in TUTORIALS.glob("*.md"))]
    if unknown := set(names) - set(known):
        raise SystemExit(f"nothing is called {sorted(unknown)[0]}: {', '.join(known)}")
    kept = []
    for job in [job for job in JOBS if job.name in names or not names]:
        if missing := lacking(job):
            kept.append(f"{job.name}: kept as it is, {' and '.join(missing)} not installed in {sys.executable}")
            continue
        profile(job, folder)
        print(row(job), flush=True)
    compare(folder)
    draw_tutorials(folder, names)
    shutil.rmtree(folder)
    (HERE / "README.md").write_text(readme())
    for line in kept:
        print(line)
    if kept and names:
        raise SystemExit(1)  # it was asked for by name


if __name__ == "__main__":
    main()
