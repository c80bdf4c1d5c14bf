"""`fakedist check` with real runs: the same bytes twice, the right exit code, and nothing written where it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Protocol
from xml.etree import ElementTree

import pytest

from tests.conftest import RunFakedist, clean_environment
from tests.support.runs import Finished

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.integration
LONG, NIGHTLY = pytest.mark.long, pytest.mark.nightly

#: The other end of what torch is supported, made by `make oldest`.
OTHER_PYTHON = Path(os.environ.get("FAKEDIST_OTHER_PYTHON", ROOT / ".venv-oldest/bin/python"))

TRAIN = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(512, width)
        self.down = nn.Linear(width, 512)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(device)
model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.randn(4096, 512, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    BREAK
"""

CONFIG = """
[tool.fakedist.check]
baselines = "baselines"
max_increase = "1%"

[[tool.fakedist.check.jobs]]
name = "net"
script = "train.py"
world_size = 64
ranks = [0, 9]
"""
#: For what a second rank adds nothing to: a run each is what these tests cost.
#: In a script, it keeps its rank from forking: its parent is then the run's process.
COLD = "sys.modules"
FIRST, LAST = CONFIG.replace("[0, 9]", "[0]"), CONFIG.replace("[0, 9]", "[9]")


def project(folder: Path, config: str = CONFIG, width: int = 2048, broken: str = "") -> Path:
    """A repository with a script and a configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN.replace("WIDTH", str(width)).replace("BREAK", broken or "pass"))
    (folder / "pyproject.toml").write_text(config)
    return folder


class Check(Protocol):
    """The type of the fixture ``checked``."""

    def __call__(self, folder: Path, *options: str) -> Finished: ...


@pytest.fixture(scope="session")
def checked(run_fakedist: RunFakedist) -> Check:
    """Check the project in a folder."""
    return lambda folder, *options: run_fakedist("check", *options, cwd=folder)


def files(folder: Path) -> dict[str, bytes]:
    """Every file that a check may have written."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, checked: Check) -> bytes:
    """The baseline of the project as it is, of both ranks."""
    return updated(project(tmp_path_factory.mktemp("first") / "project"), checked)


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory, checked: Check) -> bytes:
    """The baseline of rank 9 alone."""
    return updated(project(tmp_path_factory.mktemp("last") / "project", LAST), checked)


def updated(folder: Path, checked: Check) -> bytes:
    finished = checked(folder, "--update")
    assert finished.code == 0, finished.stderr
    return (folder / "baselines/net.json").read_bytes()


def with_baseline(folder: Path, baseline: bytes) -> Path:
    (folder / "baselines").mkdir()
    (folder / "baselines/net.json").write_bytes(baseline)
    return folder


@NIGHTLY
def test_the_same_commit_gives_the_same_bytes_in_another_directory(
    tmp_path: Path, baseline: bytes, checked: Check
) -> None:
    folder = project(tmp_path / "elsewhere")
    assert checked(folder, "--update", "--jobs", "1").code == 0
    assert (folder / "baselines/net.json").read_bytes() == baseline
    ranks = json.loads(baseline)["ranks"]
    assert list(ranks) == ["0", "9"]
    for rank in ranks.values():
        assert sum(sum(held.values()) for held in rank["layers"].values()) == rank["peak_allocated_bytes"]


@LONG
def test_the_baseline_holds_without_a_change(tmp_path: Path, last: bytes, checked: Check) -> None:
    finished = checked(with_baseline(project(tmp_path / "p", LAST), last))
    assert finished.code == 0, finished.stderr
    assert finished.stdout.count("ok") == 2
    assert "other settings" not in finished.stdout


@LONG
def test_growth_is_a_red_build_with_the_layer_to_blame(tmp_path: Path, last: bytes, checked: Check) -> None:
    folder = with_baseline(project(tmp_path / "p", LAST, width=3072), last)
    outputs = ["--junit", "out/junit.xml", "--format", "markdown", "-o", "out/check.md"]
    finished = checked(folder, *outputs, "--annotations")
    assert finished.code == 3
    line = next(text for text in finished.stderr.splitlines() if text.startswith("net rank 9: peak allocated is"))
    assert "more than its baseline of" in line
    assert "where 1% is allowed: " in line
    assert "of *" in line  # the blocks of the nn.Sequential
    assert finished.stderr.splitlines()[-1].startswith("fakedist: exit 3: ")
    annotations = [text for text in finished.stdout.splitlines() if text.startswith("::error file=train.py,line=")]
    suites = ElementTree.parse(folder / "out/junit.xml").getroot()
    failures = suites.findall("testsuite/testcase/failure")
    assert len(failures) == len(annotations) > 0
    assert line in [failure.text for failure in failures]
    assert "- net rank 9: peak allocated" in (folder / "out/check.md").read_text()


def test_a_rank_that_does_not_fit_is_exit_4_and_no_baseline(tmp_path: Path, checked: Check) -> None:
    folder = project(tmp_path / "p", FIRST + 'gpu_memory = "128 MiB"\n')
    before = files(folder)
    finished = checked(folder, "--update")
    assert finished.code == 4, finished.stderr
    assert "net rank 0 does not fit the GPU" in finished.stdout
    assert files(folder) == before


def test_an_output_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path, checked: Check) -> None:
    folder = project(tmp_path / "p")
    for option in ("--junit", "--output", "--runs"):
        finished = checked(folder, option, "train.py/out")
        assert finished.code == 2
        assert finished.stderr.startswith("fakedist: error: train.py/out")
        assert "ran in" not in finished.stderr


def test_a_missing_baseline_says_how_to_make_one_before_anything_runs(tmp_path: Path, checked: Check) -> None:
    folder = project(tmp_path / "p")
    before = files(folder)
    finished = checked(folder, "--junit", "junit.xml")
    assert finished.code == 2
    assert finished.stderr.splitlines()[1] == "  fakedist check --update net"
    assert "ran in" not in finished.stderr
    assert files(folder) == before


@pytest.mark.parametrize(
    ("broken", "told", "output"),
    [
        ('raise ValueError("no such shard")', "the script failed: ValueError: no such shard", "Traceback"),
        pytest.param('print("bye"); sys.exit(3)', "the script failed with exit code 3", "bye", marks=NIGHTLY),
        pytest.param(*("os.kill(os.getpid(), signal.SIGKILL)", "the script was killed: by SIGKILL", ""), marks=NIGHTLY),
        pytest.param(
            *(
                f"os.kill(os.getppid(), signal.SIGKILL); signal.pause()  # {COLD}",
                "the run was killed before it ended",
                "",
            ),
            marks=NIGHTLY,
        ),
    ],
)
@LONG
def test_a_script_that_fails_shows_its_own_output_and_changes_no_baseline(
    tmp_path: Path, last: bytes, broken: str, told: str, output: str, checked: Check
) -> None:
    folder = with_baseline(project(tmp_path / "p", LAST, broken=broken), last)
    before = files(folder)
    finished = checked(folder, "--update")
    assert finished.code == 1
    assert f"net rank 9: {told}" in finished.stdout
    assert output in finished.stdout
    assert "exceeded" not in finished.stderr + finished.stdout
    assert (
        finished.stderr.splitlines()[-1]
        == "fakedist: exit 1: 1 script failed, so nothing was judged; no baseline was written"
    )
    assert files(folder) == before


def leaving(folder: Path, condition: str) -> Path:
    """The project with ranks that leave the job during init."""
    path = project(folder) / "train.py"
    ready = 'dist.init_process_group("nccl")\n'
    path.write_text(path.read_text().replace(ready, f"{ready}if {condition}: sys.exit()\n"))
    return folder


@NIGHTLY
def test_a_rank_that_leaves_during_init_takes_nothing_if_others_train(tmp_path: Path, checked: Check) -> None:
    budgets = 'budgets = { headroom = "4 GiB", layers = { "*.up" = "1 GiB" }, step_time = "9 s" }\n'
    folder = leaving(tmp_path / "p", "dist.get_rank() == 9")
    (folder / "pyproject.toml").write_text(CONFIG + budgets)
    assert checked(folder, "--update").code == 0
    ranks = json.loads((folder / "baselines/net.json").read_text())["ranks"]
    assert ranks["9"]["peak_allocated_bytes"] == 0 < ranks["0"]["peak_allocated_bytes"]
    finished = checked(folder, "--junit", "junit.xml")
    assert finished.code == 0, finished.stderr
    assert "net rank 9 left the job during init, before a first step: exit 0 at train.py:" in finished.stdout
    assert "takes no memory" in (folder / "junit.xml").read_text()
    project(folder, CONFIG + budgets)
    finished = checked(folder)
    assert finished.code == 3
    assert "net rank 9: peak allocated is " in finished.stdout
    assert "more than its baseline of 0 B" in finished.stdout


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("dist.get_rank() == 9", "net rank 9: left the job during init, before a first step: exit 0 at train.py:"),
        ("True", "net: no rank allocated anything on the GPU"),
    ],
)
@NIGHTLY
def test_a_rank_that_trained_and_leaves_now_is_not_taken_for_an_improvement(
    tmp_path: Path, baseline: bytes, condition: str, told: str, checked: Check
) -> None:
    finished = checked(with_baseline(leaving(tmp_path / "p", condition), baseline))
    assert finished.code == 1
    assert told in finished.stdout
    assert finished.stderr.splitlines()[-1] == "fakedist: exit 1: 1 script failed, so nothing was judged"


def test_a_script_that_does_not_compile_is_not_run(tmp_path: Path, checked: Check) -> None:
    folder = project(tmp_path / "p", broken="else:")
    finished = checked(folder, "--update")
    assert finished.code == 1
    assert "SyntaxError" in finished.stderr
    assert finished.stderr.splitlines()[-1].endswith("the script does not compile; nothing was run")


@NIGHTLY
def test_runs_are_replaced_and_one_that_cannot_be_is_not_judged_in_place_of_the_new_one(
    tmp_path: Path, checked: Check
) -> None:
    folder = project(tmp_path / "p", FIRST)
    assert checked(folder, "--update", "--runs", "runs").code == 0
    written = (folder / "baselines/net.json").read_bytes()
    again = checked(folder, "--update", "--runs", "runs")
    assert again.code == 0
    assert "the baselines did not change" in again.stderr
    assert (folder / "baselines/net.json").read_bytes() == written
    (folder / "runs/net-rank0/notes.txt").write_text("mine")
    finished = checked(folder, "--runs", "runs")
    assert finished.code == 1
    assert "net rank 0: the run could not start (exit 1)" in finished.stdout
    assert "holds something that fakedist did not write: notes.txt" in finished.stdout + finished.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=NIGHTLY)])
def test_what_is_cancelled_leaves_nothing_running_and_nothing_written(tmp_path: Path, number: int) -> None:
    folder = project(tmp_path / "p", FIRST, broken='open("reached", "w").close(); signal.pause()')
    before = files(folder)
    command = [sys.executable, "-m", "fakedist", "check", "--update"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    restored = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, preexec_fn=restored)
    while not (folder / "reached").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate()
    assert process.returncode == 130
    assert error.decode().splitlines()[-1] == "fakedist: exit 130: interrupted"
    (folder / "reached").unlink()
    assert files(folder) == before
    left = [path for path in Path("/proc").glob("[0-9]*/cwd") if with_cwd(path, folder)]
    assert left == []


def with_cwd(path: Path, folder: Path) -> bool:
    """Whether a process runs in the folder."""
    try:
        return path.readlink() == folder
    except OSError:
        return False


@NIGHTLY
def test_a_layer_that_is_not_there_is_refused_with_a_likely_one(tmp_path: Path, checked: Check) -> None:
    config = FIRST + 'budgets = { layers = { "*.upp" = "1 GiB" } }\n'
    finished = checked(project(tmp_path / "p", config), "--update")
    assert finished.code == 2
    assert "no layer is called '*.upp'" in finished.stderr
    assert "did you mean '*.up'?" in finished.stderr


@NIGHTLY
@pytest.mark.skipif(not OTHER_PYTHON.exists(), reason="no second torch: make oldest")
@pytest.mark.skipif(OTHER_PYTHON.parent.parent == Path(sys.prefix), reason="the second torch is the one that runs this")
def test_another_torch_is_deterministic_too_and_said_before_it_is_judged(tmp_path: Path, baseline: bytes) -> None:
    folder = with_baseline(project(tmp_path / "p"), baseline)

    def checked(*options: str) -> subprocess.CompletedProcess[str]:
        command = [str(OTHER_PYTHON), "-m", "fakedist", "check", *options]
        return subprocess.run(command, cwd=folder, env=clean_environment(), capture_output=True, text=True)

    finished = checked()
    assert finished.returncode in (0, 3), finished.stderr
    first, *rest = finished.stdout.splitlines()
    assert first.startswith("the baseline of net was made with other settings: torch ")
    assert any("peak allocated" in line for line in rest)
    assert checked("--update").returncode == 0
    theirs = (folder / "baselines/net.json").read_bytes()
    assert checked("--update").returncode == 0
    assert (folder / "baselines/net.json").read_bytes() == theirs != baseline
