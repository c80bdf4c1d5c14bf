"""Peaks that others have published for known jobs, and what fakedist says of the same jobs.

    python -m tests.accuracy.published [--job NAME ...] [--packages DIR] [--write]

torchtitan publishes what its monitor read: the most that the caching allocator had reserved, over all ranks
(benchmarks/llama3_h100_202412_torchtitan.md in pytorch/torchtitan, December 2024, GPUs with 95 GiB). The jobs are run
with torchtitan 0.1.0, the release next to that, its own entry point and its own configuration; it is installed into
``--packages`` where it is not there yet. Its other requirements are those of today's torchtitan (``pip install
'fakedist[clients]'``). Tokens are made up: a tokenizer with as many words as Llama's, and a text of them.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.run.manifest import load_manifest
from fakedist.run.plain import to_plain
from tests.accuracy.results import write_result, write_tables

ROOT = Path(__file__).parents[2]
PACKAGES = ("torchtitan==0.1.0", "torchao==0.18.0", "tiktoken", "regex", "blobfile")
WORDS = 128_000  # and 256 special ones, as Llama 3's
GPU_MEMORY = "95GiB"
TIMEOUT_S = 900
CONFIG = """\
[metrics]
log_freq = 1
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 4
dataset = "c4_test"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
#: What the script imports first: torchtitan 0.1.0 compiles the loss with the model, that of December 2024 did not yet.
PLAIN_LOSS = """\
import torchtitan.models.llama3
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.protocols.train_spec import get_train_spec

get_train_spec("llama3").build_loss_fn = lambda job_config: cross_entropy_loss
"""
COMPILE = ("--training.compile", "--experimental.custom_import", "plain_loss")
FLOAT8 = (
    "--model.converters", "float8", "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)  # fmt: skip
_LOSS = "the loss is not compiled, as in December 2024 (torchtitan 0.1.0 would); a different Inductor"


@dataclass(frozen=True)
class Published:
    """A published figure.

    Attributes:
        name: For ``--job``.
        job: What ran.
        world_size: Ranks of it.
        published_gib: Peak reserved, GiB.
        flags: Of torchtitan.
        why: What else differs between the published run and ours.
    """

    name: str
    job: str
    world_size: int
    published_gib: float
    flags: tuple[str, ...]
    why: str


FIGURES = (
    Published("8b-8", "Llama 3.1 8B, FSDP, 8 GPUs", 8, 82.4, (), "their torch is of December 2024"),
    Published("8b-8-compile", "the same, torch.compile", 8, 77.0, COMPILE, _LOSS),
    Published(
        "8b-8-float8", "the same, torch.compile, Float8", 8, 76.8, COMPILE + FLOAT8, _LOSS + ", a different torchao"
    ),
    Published("8b-128", "Llama 3.1 8B, FSDP, 128 GPUs", 128, 67.0, (), "their torch is of December 2024"),
    Published("8b-128-compile", "the same, torch.compile", 128, 62.0, COMPILE, _LOSS),
    Published(
        "8b-128-float8", "the same, torch.compile, Float8", 128, 61.8, COMPILE + FLOAT8, _LOSS + ", a different torchao"
    ),
)


def run_published(figure: Published, packages: Path) -> dict[str, Any]:
    """Run one job's rank 0; a row for docs/accuracy/published.json.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="published-") as text:
        directory = Path(text)
        _write_inputs(directory)
        profile = ["profile", "--world-size", str(figure.world_size), "--rank", "0", "--device", "virtual"]
        profile += ["--gpu-memory", GPU_MEMORY, "--steps", "3", "-o", "run"]
        script = ["-m", "torchtitan.train", "--job.config_file", "config.toml", *figure.flags]
        path = os.pathsep.join([str(ROOT), str(packages), str(directory)])
        done = subprocess.run(
            [sys.executable, "-m", "fakedist", *profile, *script],
            cwd=directory, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            done.check_returncode()
        summary = to_plain(load_manifest(directory / "run").summary)
    return {
        "name": figure.name,
        "job": figure.job,
        "published_gib": figure.published_gib,
        "allocated_bytes": summary["peak_allocated_bytes"],
        "reserved_bytes": summary["peak_reserved_bytes"],
        "why": figure.why,
    }


def _write_inputs(directory: Path) -> None:
    (directory / "config.toml").write_text(CONFIG)
    (directory / "plain_loss.py").write_text(PLAIN_LOSS)
    lines = [f"{base64.b64encode(word).decode()} {number}" for number, word in enumerate(_words())]
    (directory / "tokenizer.model").write_text("\n".join(lines) + "\n")
    texts = directory / "tests" / "assets" / "c4_test"
    texts.mkdir(parents=True)
    text = " ".join(f"word{number} text" for number in range(3_000))
    (texts / "data.json").write_text((json.dumps({"text": text}) + "\n") * 200)


def _words() -> Iterator[bytes]:
    letters = b"abcdefghijklmnopqrstuvwxyz"
    single = (bytes([byte]) for byte in range(256))
    longer = (bytes(word) for length in (2, 3, 4) for word in itertools.product(letters, repeat=length))
    return itertools.islice(itertools.chain(single, longer), WORDS)


def _install(packages: Path) -> None:
    if not (packages / "torchtitan").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, *PACKAGES], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=[figure.name for figure in FIGURES])
    parser.add_argument("--packages", type=Path, default=ROOT / "build" / "published")
    parser.add_argument("--write", action="store_true", help="into docs/accuracy and docs/accuracy.md")
    chosen = parser.parse_args(arguments)
    _install(chosen.packages)
    rows = []
    for figure in FIGURES:
        if not chosen.job or figure.name in chosen.job:
            rows.append(run_published(figure, chosen.packages.resolve()))
            ours = rows[-1]["reserved_bytes"] / (1 << 30)
            print(f"{figure.name:<16} published {figure.published_gib:.1f} GiB, ours {ours:.2f} GiB", flush=True)
    if chosen.write:
        write_result("published", rows, torchtitan="0.1.0")
        write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
