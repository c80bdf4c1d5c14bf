"""Memory that no computed value reached is never read as a value: not by compilers, other threads, or code in C."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from fakedist.gpu.native import find_c_compiler
from tests.conftest import RunFakedist

pytestmark = pytest.mark.long

JOB = Path(__file__).parent / "jobs" / "old_memory.py"
_LIBRARY = """
#include <dlfcn.h>
#include <pthread.h>
struct copy { void *to; const void *from; unsigned long size; };
static void *run(void *given) {
    struct copy *c = given;
    int (*copy)(void *, const void *, unsigned long, int) = dlsym(RTLD_DEFAULT, "cudaMemcpy");
    copy(c->to, c->from, c->size, 2);
    return 0;
}
int read_in_thread(void *to, const void *from, unsigned long size) {
    struct copy c = {to, from, size};
    pthread_t thread;
    return pthread_create(&thread, 0, run, &c) || pthread_join(thread, 0);
}
"""


class Ran(NamedTuple):
    """A run of the job: what it printed, its table ``invented`` and its notes."""

    said: dict[str, Any]
    invented: list[dict[str, Any]]
    notes: list[str]


def _run(run_fakedist: RunFakedist, directory: Path, **environment: str) -> Ran:
    source, library = directory / "read.c", directory / "read.so"
    source.write_text(_LIBRARY)
    subprocess.run(
        [find_c_compiler(), "-shared", "-fPIC", "-pthread", source, "-o", library, "-ldl"],
        check=True,
    )
    caches = {name: str(directory / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    options = ["--world-size", "8", "--rank", "0", "--until", "end", "-o", directory / "run"]
    finished = run_fakedist("profile", "--device", "virtual", *options, JOB, library, env=caches | environment)
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("SAID "))
    invented = pd.read_parquet(directory / "run/tables/invented.parquet")
    notes = [note["text"] for note in run_fakedist("report", directory / "run", "--json").json()["notes"]]
    return Ran(json.loads(line.removeprefix("SAID ")), invented.astype(str).to_dict("records"), notes)


@pytest.fixture(scope="module")
def ran(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return _run(run_fakedist, tmp_path_factory.mktemp("plain"))


def test_constants_that_inductor_folds_are_computed(ran: Ran) -> None:
    assert ran.said["constants"] == [
        "torch.bfloat16 8.5",  # 2.5 * 3 + 1
        "torch.float32 0.0",
        "torch.float32 2.5",
        "torch.int64 0",
    ]


def test_fills_and_copies_of_threads_that_nothing_follows_are_done(ran: Ran) -> None:
    assert ran.said["a thread's fill"] == [7, 7, 7]
    assert ran.said["a thread's copy"] == [1.5, 2.5]
    assert ran.said["known to a thread of C"] == [2, 3, 4]
    assert ran.said["uploaded by another thread"] == [8, 9]


def test_all_else_is_made_up_and_counted_where_it_was_read(ran: Ran) -> None:
    assert ran.said["a thread's sum"] == [0, 0]
    assert ran.said["a thread's empty memory"] == [0.0] * 4
    assert ran.said["unknown to a thread of C"] == [0.0] * 3
    lines = JOB.read_text().splitlines()
    places = [row["line"].rpartition(":") for row in ran.invented]
    counted = {lines[int(line) - 1].split('"')[1] for _, _, line in places if line.isdecimal()}
    assert {
        *("a thread's sum", "a thread's empty memory", "written by another thread", "branch"),
        *("a kernel of the script's own", "written by a compiled graph"),
    } <= counted
    assert not {"a thread's fill", "a thread's copy", "uploaded by another thread", "constants"} & counted
    assert any("threads that are not Python's" in note for note in ran.notes)


def test_a_kernel_that_nothing_follows_takes_values_away(ran: Ran) -> None:
    """The sum is not computed, so the tensor does not hold what it held before. What was only read stays."""
    assert ran.said["written by another thread"] == [[0, 0, 0], [4, 5, 6]]
    assert ran.said["a kernel of the script's own"] == [[0, 0, 0], [1, 2, 3]]
    assert ran.said["written by a compiled graph"] == [0, [5, 6]]


@pytest.mark.nightly
def test_what_memory_held_before_changes_nothing(
    ran: Ran, run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert _run(run_fakedist, tmp_path_factory.mktemp("poisoned"), FAKEDIST_POISON="1") == ran
