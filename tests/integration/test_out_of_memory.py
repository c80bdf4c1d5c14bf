"""A rank that does not fit goes on beyond the GPU's memory, and says how much it needs and where it was too little."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import RunFakedist

JOB = Path(__file__).parent / "jobs" / "out_of_memory.py"
LINES = JOB.read_text().splitlines()
MIB = 1 << 20

pytestmark, LONG = pytest.mark.integration, pytest.mark.long


class Ran(NamedTuple):
    code: int
    report: dict[str, Any]
    said: str


class Runs(dict[str, Ran]):
    """Each kind of run, once, when a test asks for it."""

    def __init__(self, profile: Callable[[str], Ran]) -> None:
        super().__init__()
        self._profile = profile

    def __missing__(self, name: str) -> Ran:
        self[name] = self._profile(name)
        return self[name]


#: For each kind of run, the script's argument, and options.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "first forward": ("first_forward", ()),
    "backward": ("backward", ()),
    "unlimited": ("backward", ("--gpu-memory", "unlimited")),
    "expandable": ("forward", ("--env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")),
    "raise": ("forward", ("--oom", "raise")),
    "finders": ("finders", ()),
    "fraction": ("fraction", ("--gpu-memory", "1GiB")),
    "pool": ("pool", ()),
}


@pytest.fixture(scope="module")
def runs(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    def profile(name: str) -> Ran:
        how, options = KINDS[name]
        if "--gpu-memory" not in options:
            options += ("--gpu-memory", "512MiB")
        rank = ("--world-size", "1", "--rank", "0", "--device", "virtual")
        path = tmp_path_factory.mktemp("ran") / "run"
        ended = run_fakedist("profile", *rank, *options, "--json", "-o", path, JOB, how)
        return Ran(ended.code, ended.json(), ended.stderr)

    return Runs(profile)


def line(text: str) -> str:
    """The script's line that contains the text, as a report names it."""
    return f"{JOB}:{next(number for number, code in enumerate(LINES, 1) if text in code)}"


@pytest.mark.parametrize(
    "name",
    ["first forward", *(pytest.param(kind, marks=LONG) for kind in ("backward", "expandable", "fraction", "pool"))],
)
def test_the_run_goes_on_and_says_what_it_needs(runs: Runs, name: str) -> None:
    code, report, said = runs[name]
    assert code == 4, said
    assert said.rstrip().endswith("fakedist: exit 4: the rank does not fit the GPU")
    assert "Traceback" not in said  # of what stops the script after the recorded steps
    assert said.count("memory mapping failed") <= 1  # torch 2.15 warns of each refused piece of an expandable segment
    failed = report["out_of_memory"]
    assert not report["fits"]
    assert failed["went_on"]
    assert failed["limit_bytes"] == 512 * MIB
    assert report["peak_reserved_bytes"] > failed["limit_bytes"] >= failed["reserved_bytes"]
    assert failed["reserved_bytes"] >= failed["allocated_bytes"] > failed["limit_bytes"] - 600 * MIB
    assert len(report["steps"]) == 2
    assert report["time"]["step_us"] > 0
    assert (re.findall(r"^free (\d+)", said, re.MULTILINE) or ["", ""])[-1] == "0"


@LONG
@pytest.mark.parametrize(
    ("name", "step", "phase"),
    [
        ("first forward", 1, "forward"),
        ("backward", 2, "backward"),
        ("expandable", 2, "forward"),
        ("raise", 2, "forward"),
        ("fraction", 2, "forward"),
    ],
)
def test_it_says_where_it_was_first_refused(runs: Runs, name: str, step: int, phase: str) -> None:
    failed = runs[name].report["out_of_memory"]
    assert (failed["step"], failed["phase"]) == (step, phase)
    assert failed["layer"].split(".")[0] in "0123"
    called = [called.rpartition(" ")[2] for called in failed["stack"]]
    if phase == "backward":  # the line whose gradient it computes
        assert failed["line"].startswith(f"{line('return rows + self.down')} (forward, backward)")
    else:
        assert failed["line"].startswith(f"{line('return rows + self.down')} (forward)")
        assert called[:4] == ["(forward)", "(train)", "(main)", "(<module>)"]  # then the test's, if the rank forked


@LONG
def test_what_it_needs_is_what_it_takes_without_a_limit_less_the_caches_that_are_freed(runs: Runs) -> None:
    limited, unlimited = runs["backward"].report, runs["unlimited"].report
    assert limited["peak_allocated_bytes"] == unlimited["peak_allocated_bytes"]
    assert unlimited["peak_allocated_bytes"] <= limited["peak_reserved_bytes"] <= unlimited["peak_reserved_bytes"]
    assert unlimited["advice"] == []  # less than 1 % of the 80 GB that it then has
    first = limited["advice"][0]  # it makes the rank fit
    assert (first["rule"], "fit" in first["fits"]) == ("expandable-segments", True)
    assert "not" not in first["fits"]
    assert limited["by_category"] == unlimited["by_category"]


@LONG
def test_where_nothing_goes_on_the_least_is_said_and_activations_count_as_saved(runs: Runs) -> None:
    code, report, said = runs["raise"]
    assert code == 4
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in said
    failed = report["out_of_memory"]
    assert not failed["went_on"]
    assert len(report["steps"]) == 1
    assert failed["limit_bytes"] < failed["reserved_bytes"] + failed["requested_bytes"]
    gives = {piece["rule"]: piece["gives_bytes"] for piece in report["advice"]}["checkpoint"]
    assert gives > 0.5 * report["by_category"]["activation"]


@LONG
def test_a_script_that_looks_for_a_size_that_fits_finds_it(runs: Runs) -> None:
    code, report, said = runs["finders"]
    assert code == 0, said
    assert "found 500 375" in said
    assert report["fits"]
    assert report["out_of_memory"] is None
    assert "went_on_without_memory" in {note["code"] for note in report["notes"]}


@LONG
def test_a_fraction_of_the_memory_is_a_limit_alike(runs: Runs) -> None:
    report, said = runs["fraction"].report, runs["fraction"].said
    assert "fraction 0.5" in said
    assert report["capacity_bytes"] == 1024 * MIB
