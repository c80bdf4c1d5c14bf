"""Run the cases of PyTorch's tests: one rank of jobs of 2, 4 and 8 ranks here, and one on stock torch's fake backend.

``python tests/clients/pytorch_cases/run.py`` writes ``results.json`` next to this file and ``docs/pytorch-tests.md``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
JOB = HERE / "one_rank.py"
RESULTS = HERE / "results.json"
PAGE = ROOT / "docs" / "pytorch-tests.md"
#: (ranks, rank) of the jobs here; the fake backend runs the last one's.
WORLDS = ((2, 1), (4, 0), (8, 5))
_HEAD = """# PyTorch's own tests

{count} of PyTorch's tests, rewritten as small functions that do and assert the same: distributed ones, and those of
sparse and nested tensors, `torch.func`, compiled optimizers, quantized tensors and other kinds of modules. Sources of
`sparse`, `nested`, `transforms`, `training` and `quantized` are in PyTorch's `test`, the others in `test/distributed`.
Each runs as one rank: on stock torch's `fake` backend (CPU tensors), and under `fakedist profile` on the virtual GPU
(ranks {worlds}). A case passes here if it passes on each of these ranks. "Adapted" shows how a case differs from
PyTorch's test. If PyTorch's test gives each rank different numbers, all ranks get the same ones here, so its assertions
also hold in a real job.

{table}

{here} of {count} pass here, {stock} on stock `fake` (torch {torch}). The cases are `tests/clients/pytorch_cases/`;
`python tests/clients/pytorch_cases/run.py` runs them and writes this page.
"""


def results_of(printed: str) -> dict[str, str]:
    """Each case's error, empty where it passed; a case that began and did not end ended its process."""
    found: dict[str, str] = {}
    for line in printed.splitlines():
        if line.startswith("CASE "):
            result = json.loads(line.removeprefix("CASE "))
            found[result["case"]] = "ended the process" if result["error"] is None else result["error"]
    return found


def run_here(size: int, rank: int) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        where = ["--world-size", size, "--rank", rank, "--device", "virtual", "-o", f"{folder}/run"]
        how = ["--steps", 1000, "--no-kernels"]
        return _results([sys.executable, "-m", "fakedist", "profile", *where, *how, JOB])


def run_stock(size: int, rank: int) -> dict[str, str]:
    return _results([sys.executable, JOB, "--stock", size, rank])


def _results(command: list[Any]) -> dict[str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [str(part) for part in command]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    found = results_of(finished.stdout)
    assert found, finished.stderr[-2000:]
    return found


def table(results: dict[str, Any]) -> str:
    rows = [
        "| case | PyTorch's test | asserts | adapted | stock `fake` | here | why not |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in results["cases"]:
        why = case["why"].replace("|", "\\|") or ("" if case["here"] else "a defect")
        stock = "yes" if case["stock"] else "no"
        cells = [f"`{case['case']}`", f"`{case['source']}`", case["asserts"], case["adapted"], stock]
        rows.append("| " + " | ".join([*cells, "yes" if case["here"] else "no", why]) + " |")
    counts = {name: sum(case[name] for case in results["cases"]) for name in ("here", "stock")}
    worlds = ", ".join(f"{rank} of {size}" for size, rank in results["worlds"])
    return _HEAD.format(
        count=len(results["cases"]), worlds=worlds, table="\n".join(rows), torch=results["torch"], **counts
    )


def main() -> None:
    """Run all, write the results and the page."""
    import torch

    from tests.clients.pytorch_cases.one_rank import CASES

    here = [run_here(size, rank) for size, rank in WORLDS]
    stock = run_stock(*WORLDS[-1])
    cases = []
    for case in CASES:
        called = f"{case.subject}.{case.name}"
        errors = {f"{rank} of {size}": found[called] for (size, rank), found in zip(WORLDS, here, strict=True)}
        cases.append(
            {
                "case": called,
                "source": case.source,
                "asserts": case.asserts,
                "adapted": case.adapted,
                "stock": not stock.get(called, "did not run"),
                "here": not any(errors.values()),
                "why": case.why,
                "errors": {name: error for name, error in errors.items() if error},
            }
        )
    results = {"torch": str(torch.__version__), "worlds": WORLDS, "cases": cases}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
