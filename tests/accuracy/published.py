"""Peaks that others have published for known jobs, and what fakedist says of the same jobs.

    python -m tests.accuracy.published [--job NAME ...] [--packages DIR] [--write]

torchtitan publishes what its monitor read: the most that the caching allocator had reserved, over all ranks
(benchmarks/llama3_h100_202412_torchtitan.md in pytorch/torchtitan, December 2024, GPUs with 95 GiB). ``titan`` runs the
same jobs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakedist.rundir.manifest import load_manifest
from fakedist.rundir.plain import to_plain
from tests.accuracy import titan
from tests.accuracy.results import write_result, write_tables
from tests.accuracy.titan import COMPILE, FLOAT8

_NEWER = "a newer torch and torchtitan"
_COMPILED = f"{_NEWER}, a different Inductor"
_FLOAT8 = f"{_COMPILED}, a different torchao"


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
    Published("8b-8", "Llama 3.1 8B, FSDP, 8 GPUs", 8, 82.4, (), _NEWER),
    Published("8b-8-compile", "the same, torch.compile", 8, 77.0, COMPILE, _COMPILED),
    Published("8b-8-float8", "the same, torch.compile, Float8", 8, 76.8, COMPILE + FLOAT8, _FLOAT8),
    Published("8b-128", "Llama 3.1 8B, FSDP, 128 GPUs", 128, 67.0, (), _NEWER),
    Published("8b-128-compile", "the same, torch.compile", 128, 62.0, COMPILE, _COMPILED),
    Published("8b-128-float8", "the same, torch.compile, Float8", 128, 61.8, COMPILE + FLOAT8, _FLOAT8),
)


def run_published(figure: Published, packages: Path) -> dict[str, Any]:
    """Run one job's rank 0; a row for docs/accuracy/published.json.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="published-") as text:
        run = titan.profile(Path(text), packages, figure.world_size, figure.flags)
        summary = to_plain(load_manifest(run).summary)
    return {
        "name": figure.name,
        "job": figure.job,
        "published_gib": figure.published_gib,
        "allocated_bytes": summary["peak_allocated_bytes"],
        "reserved_bytes": summary["peak_reserved_bytes"],
        "why": figure.why,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", action="append", choices=[figure.name for figure in FIGURES])
    parser.add_argument("--packages", type=Path, default=titan.INSTALLED)
    parser.add_argument("--write", action="store_true", help="the data and the table into docs/accuracy")
    chosen = parser.parse_args(arguments)
    titan.install(chosen.packages)
    rows = []
    for figure in FIGURES:
        if not chosen.job or figure.name in chosen.job:
            rows.append(run_published(figure, chosen.packages))
            ours = rows[-1]["reserved_bytes"] / (1 << 30)
            print(f"{figure.name:<16} published {figure.published_gib:.1f} GiB, ours {ours:.2f} GiB", flush=True)
    if chosen.write:
        write_result("published", rows, torchtitan=titan.VERSION)
        write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
