"""Draws of loads for the published mixture of experts, as ``fakedist play`` makes them for the hottest rank.

    python -m tests.accuracy.golden_loads [--write]

The row ``moe-mla`` of tests/truth runs with even loads. Which loads of its last rank have the published peak?
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from fakedist.check.running import run_rank
from fakedist.extras.play.player import play
from fakedist.extras.play.router_draws import open_playable
from tests.accuracy.results import write_result, write_tables
from tests.truth.__main__ import Run
from tests.truth.catalogue import WORKSPACE_BYTES, Row, catalogue

#: Loads whose draws are played, each so often, and the one that is recorded.
LOADS, DRAWS, RECORDED = ("lognormal:0.05", "lognormal:0.2", "lognormal:0.5", "lognormal:1"), 40, "lognormal:0.3"


def load_row(row: Row, run: Path, load: str) -> dict[str, Any]:
    """Draw a load of the row's rank, given its run; a row for docs/accuracy/golden-loads.json."""
    playable = open_playable(run)
    program = run.parent / "program.npz"
    playable.write(program)
    draws = list(playable.draws(load, range(DRAWS), rank=row.gpus - 1))
    left = row.num_workspaces[1] * WORKSPACE_BYTES - row.peak_bytes[1]
    played = play(program, (draw.counts for draw in draws), playable.alloc_conf)
    rest = [one["peak_allocated_bytes"] + left for one in played]
    shares = [draw.share for draw in draws]
    return {
        "name": row.name, "load": load, "draws": DRAWS, "shares": [min(shares), max(shares)],
        "left_bytes": [min(rest), int(median(rest)), max(rest)], "below": sum(one <= 0 for one in rest),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the data and the table into docs/accuracy")
    chosen = parser.parse_args(arguments)
    row = catalogue().row("moe-mla")
    with tempfile.TemporaryDirectory(prefix="golden-") as text:
        rank = Run(row, row.gpus - 1, is_timed=False).to_run(Path(text))
        rank = dataclasses.replace(rank, job=dataclasses.replace(rank.job, router_load=RECORDED))
        run_rank(rank, Path(text))
        rows = [load_row(row, rank.run_directory, load) for load in LOADS]
    print(*rows, sep="\n")
    if chosen.write:
        packages = {name: version(name) for name in ("megatron-core", "transformer-engine")}
        write_result("golden-loads", rows, **packages)
        write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
