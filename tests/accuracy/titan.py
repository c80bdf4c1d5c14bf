"""torchtitan's Llama 3.1 8B as it ran for the published tables of December 2024 and of early 2025.

The jobs are run with torchtitan 0.1.0, the release next to those, its own entry point and its own configuration; its
other requirements are those of today's torchtitan (``pip install 'fakedist[clients]'``). ``december_2024`` next to this
file takes back what changed since then in torchtitan and torch. Tokens are made up: a tokenizer with as many words as
Llama's, and a text of them.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = "0.1.0"
PACKAGES = (f"torchtitan=={VERSION}", "torchao==0.18.0", "tiktoken", "regex", "blobfile")
INSTALLED = ROOT / "build" / "published"
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
steps = 8
dataset = "c4_test"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
#: torchtitan's optimizer was not the fused one until spring 2025 ("foreach": not job_config.optimizer.fused).
_FOREACH = ("--optimizer.implementation", "foreach")
AS_THEN = ("--experimental.custom_import", "december_2024", *_FOREACH)
#: Until summer 2024 its own RMSNorm was one Triton kernel. Today's torch has one kernel of its own.
EARLY_2024 = ("--experimental.custom_import", "plain_loss", *_FOREACH)
#: In June 2025, the optimizer was the fused one and the loss compiled.
JUNE_2025 = ("--experimental.custom_import", "june_2025")
COMPILE = ("--training.compile",)
FLOAT8 = (
    "--model.converters", "float8", "--float8.enable_fsdp_float8_all_gather",
    "--float8.precompute_float8_dynamic_scale_for_fsdp",
)  # fmt: skip


def install(packages: Path) -> None:
    """Install torchtitan 0.1.0 into a directory, unless it is installed.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    if not (packages / "torchtitan").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, *PACKAGES], check=True)


def profile(
    directory: Path, packages: Path, world_size: int, flags: Sequence[str], *, as_then: Sequence[str] = AS_THEN
) -> Path:
    """Run rank 0 of a job in ``directory``; its run directory.

    Args:
        directory: An existing directory for the job's files.
        packages: Where torchtitan 0.1.0 was installed.
        world_size: Ranks of the job.
        flags: Flags of torchtitan.
        as_then: Further flags, which take back what changed since then.

    Raises:
        subprocess.CalledProcessError: It failed. Its last words are on stderr.
    """
    _write_inputs(directory)
    options = ["--world-size", str(world_size), "--rank", "0", "--device", "virtual", "--force"]
    options += ["--gpu-memory", GPU_MEMORY, "--steps", "3", "--no-page", "-o", "run"]
    script = ["-m", "torchtitan.train", "--job.config_file", "config.toml", *as_then, *flags]
    path = os.pathsep.join([str(ROOT), str(packages.resolve()), str(Path(__file__).parent / "december_2024")])
    done = subprocess.run(
        [sys.executable, "-m", "fakedist", "profile", *options, *script],
        cwd=directory, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        done.check_returncode()
    return directory / "run"


def _write_inputs(directory: Path) -> None:
    (directory / "config.toml").write_text(CONFIG)
    lines = [f"{base64.b64encode(word).decode()} {number}" for number, word in enumerate(_words())]
    (directory / "tokenizer.model").write_text("\n".join(lines) + "\n")
    texts = directory / "tests" / "assets" / "c4_test"
    texts.mkdir(parents=True, exist_ok=True)
    text = " ".join(f"word{number} text" for number in range(3_000))
    (texts / "data.json").write_text((json.dumps({"text": text}) + "\n") * 200)


def _words() -> Iterator[bytes]:
    letters = b"abcdefghijklmnopqrstuvwxyz"
    single = (bytes([byte]) for byte in range(256))
    longer = (bytes(word) for length in (2, 3, 4) for word in itertools.product(letters, repeat=length))
    return itertools.islice(itertools.chain(single, longer), WORDS)
