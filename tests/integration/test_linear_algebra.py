"""cuSOLVER, cuBLAS's factorisations and cuSPARSE through torch: jobs/linear_algebra.py in one whole run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fakedist.cost_model.kernels.kernel_times import roofline_us
from fakedist.gpu.models.catalogue import find_gpu
from tests.conftest import RunFakedist

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "jobs" / "linear_algebra.py"
SOLVERS = "cusolverDn|cublas.trsm"


@dataclass(frozen=True)
class Solved:
    """The run: what the script wrote, the summary and tables."""

    written: dict[str, Any]
    summary: dict[str, Any]
    kernels: pd.DataFrame
    invented: pd.DataFrame

    def note(self, code: str) -> str:
        """The text of a note; empty if there is none of that code."""
        return next((str(note["text"]) for note in self.summary["notes"] if note["code"] == code), "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, run_fakedist: RunFakedist) -> Solved:
    directory = tmp_path_factory.mktemp("linear_algebra")
    options = ("--world-size", "1", "--rank", "0", "--until", "end", "--steps", "3", "--json")
    done = run_fakedist("profile", *options, "-o", directory / "run", JOB, directory / "written.json")
    kernels, invented = (
        pd.read_parquet(directory / "run" / "tables" / f"{name}.parquet") for name in ("kernels", "invented")
    )
    return Solved(json.loads((directory / "written.json").read_text()), done.json(), kernels, invented)


def test_every_function_runs_and_no_call_is_refused(run: Solved) -> None:
    assert run.written["failed"] == {}
    assert [note for note in run.summary["notes"] if "is not answered" in note["text"]] == []


def test_small_matrices_of_known_values_are_still_computed(run: Solved) -> None:
    assert run.written["known"] == [[0.5, 0.0], [0.0, 0.25]]


def test_sizes_of_work_areas_are_named_as_estimated(run: Solved) -> None:
    assert "the sizes of work areas are estimated for cusolverDn" in run.note("work_areas_estimated")


def test_an_eigenvalue_that_the_script_reads_is_made_up_and_named(run: Solved) -> None:
    line = next(i for i, text in enumerate(JOB.read_text().splitlines(), 1) if "largest eigenvalue" in text)
    read = run.invented[run.invented["line"].str.endswith(f"{JOB.name}:{line}")]
    assert read["num_values"].sum() >= 1


def test_whether_a_factorisation_worked_is_known_and_not_made_up(run: Solved) -> None:
    """``info`` is 0, so who only asks for it reads no made-up value. (torch itself reads values of ``eig``.)"""
    lines = JOB.read_text().splitlines()
    of_job = run.invented.loc[run.invented["line"].str.contains(JOB.name), "line"].str.rsplit(":", n=1).str[-1]
    reading = [lines[int(number) - 1].strip() for number in of_job]
    asking = [f'yield "{name}"' for name in ("svd", "eigh", "cholesky", "inv", "solve", "lu_factor", "qr", "slogdet")]
    assert [text for text in reading if text.startswith((*asking, "inverse = ", "state["))] == []


def test_each_factorisation_has_a_time_that_is_bounded_by_its_roofline(run: Solved) -> None:
    solvers = run.kernels[run.kernels["name"].str.contains(SOLVERS)]
    assert {"cusolverDn"} <= {name[:10] for name in solvers["name"]}
    assert set(solvers["phase"]) == {"optimizer"}, "what follows the last optimizer step is not timed"
    assert (solvers["flops"] > 0).all()
    least = roofline_us(solvers.assign(dtype="fp32", over_host_link=False), find_gpu("h100-80g"))
    assert (solvers["low_us"] >= least - 1e-6).all()
    assert (solvers["high_us"] > 10 * solvers["low_us"]).all(), "only the least is known"
