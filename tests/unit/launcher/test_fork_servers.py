"""Work done while the rank runs, and once it has written its last record."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakedist.launcher import fork_servers
from fakedist.launcher.fork_servers import Ahead, RankDoor, RankServer, priced_gpu
from fakedist.options import Job
from fakedist.rundir.directory import JOURNAL_NAME
from tests.unit.analysis.recorded import MIB, HandMade, new_run


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankServer]:
    (program := tmp_path / "server.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(fork_servers, "_PROGRAM", str(program))
    made = RankServer(tmp_path / "imports.json")
    yield made
    made.close()


def write_imports(directory: Path, key: str = "script", **more: object) -> None:
    """Write the file as a rank that starts on its own does."""
    scratch = directory / "imports.new"
    scratch.write_text(json.dumps({"key": key, "started": dict(os.environ), "cwd": "/", **more}))
    os.replace(scratch, directory / "imports.json")


def test_a_server_stays_until_another_script_or_environment_has_ranks(server: RankServer, tmp_path: Path) -> None:
    assert server.door("script").descriptor is None
    pids = []
    for modules in (["torch", "torch.fx"], ["torch"]):  # the server itself may leave some out
        write_imports(tmp_path, modules=modules)
        assert server.door("script").descriptor is not None
        pids.append(server.pid)
    assert pids[0] == pids[1]
    assert server.door("another script").descriptor is None
    for more in ({"key": "another script"}, {"started": {"A": "1"}}):
        write_imports(tmp_path, **more)  # type: ignore[arg-type]
        assert server.door(str(more.get("key", "script"))).descriptor is not None
        pids.append(server.pid)
    assert len(set(pids)) == 3


def test_a_server_that_ended_is_not_started_again(server: RankServer, tmp_path: Path) -> None:
    write_imports(tmp_path)
    assert server.door("script").descriptor is not None
    assert server.pid is not None
    os.kill(server.pid, 9)
    os.waitpid(server.pid, 0)
    server.reaped(server.pid)
    assert server.door("script").descriptor is None
    write_imports(tmp_path, "another script")
    assert server.door("another script").descriptor is not None


@pytest.mark.parametrize("descriptor", [None, 0])
def test_a_door_passes_through_the_environment(descriptor: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    door = RankDoor(Path("/a:b/imports.json"), descriptor)
    for name, value in door.variable().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "set_inheritable", lambda *arguments: None)
    assert RankDoor.from_environment() == door
    assert RankDoor.from_environment() is None


JOB = Job(world_size=8, rank=0, target="train.py", page=False)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = HandMade()
    made.op("forward", 1, made.layer("head"))
    made.alloc(0, 4 * MIB)
    made.step(1)
    made.ended()
    return made.write(new_run(tmp_path / "run"))


def test_tables_are_computed_once_all_is_recorded(run: Path) -> None:
    before = sorted(run.iterdir())
    with Ahead(JOB, run) as work:
        work.recorded()
    assert work.computed is not None
    assert work.computed.tables["blocks"]["requested_bytes"].tolist() == [4 * MIB]
    assert sorted(run.iterdir()) == before  # nothing is written before it is known how the rank ended


@pytest.mark.parametrize("is_recorded", [False, True])
def test_tables_are_not_computed_of_half_a_recording(run: Path, is_recorded: bool) -> None:
    with Ahead(dataclasses.replace(JOB, nsys=is_recorded), run) as work:  # nsys's part comes when the rank has ended
        if is_recorded:
            work.recorded()
    assert work.computed is None


def test_what_cannot_be_computed_is_left_for_later(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / JOURNAL_NAME).unlink()
    with Ahead(JOB, run) as work:
        work.recorded()
    assert work.computed is None
    assert capsys.readouterr() == ("", "")


def test_a_step_is_priced_on_the_virtual_gpu_if_kernels_are_wanted() -> None:
    jobs = [dataclasses.replace(JOB, **more) for more in ({}, {"kernels": False}, {"device": "cuda"})]
    assert [priced_gpu(job) for job in jobs] == [JOB.gpu, "", ""]
