"""A live page: what a run's journal has so far, whatever state its directory is in."""

import http.client
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fakedist.report.content.job import runs_report
from fakedist.report.page.live import LiveMemory, LiveServer, RunFollower, follower_of
from fakedist.report.render.html import report_page
from fakedist.results.building import build_tables
from fakedist.results.job_time import open_job_runs
from fakedist.results.opening import open_run
from fakedist.rundir.directory import JOURNAL_NAME, MANIFEST_NAME, PAGE_NAME
from fakedist.rundir.manifest import load_manifest, write_manifest
from fakedist.rundir.memory_records import EventsRecord
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.schema import ACTIONS
from tests.unit.analysis.recorded import MIB, HandMade, new_run
from tests.unit.report.handmade import recorded

HOSTILE = '<script>alert("k")</script>'


def goes_on(directory: Path, made: HandMade) -> Path:
    """The directory of a run that has not ended."""
    run = made.write(new_run(directory))
    write_manifest(run, replace(load_manifest(run), exit=Ending(Outcome.RUNNING, None), summary=None))
    return run


def rows(state: dict[str, object]) -> dict[str, str]:
    return dict(state["rows"])  # type: ignore[call-overload, no-any-return]


def test_it_waits_for_a_run_and_for_its_first_record(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path / "run")
    assert follower.state()["title"] == f"waiting for {tmp_path / 'run'}"
    run = goes_on(tmp_path / "run", recorded())
    whole = (run / JOURNAL_NAME).read_bytes()
    for length in (0, 2, 4, 9, len(whole) // 2, len(whole) - 3, len(whole)):
        (run / JOURNAL_NAME).write_bytes(whole[:length])
        assert not follower.state()["done"]
    assert rows(follower.state())["steps that ended"] == "2"


def test_it_says_what_the_report_says_once_the_run_has_ended(tmp_path: Path) -> None:
    run = goes_on(tmp_path / "run", recorded())
    follower = RunFollower(run)
    live = follower.state()
    assert rows(live)["last step"].startswith("step 2 in ")
    assert follower.state()["points"] == live["points"]  # nothing is read twice
    assert not live["done"]
    build_tables(run)
    assert follower.state()["done"]
    table = open_run(run).table("events")
    points = np.array(live["points"])
    assert points[:, 1].max() == table["allocated_bytes"].max()
    assert points[:, 2].max() == table["reserved_bytes"].max()
    assert "<html" in follower.report()


def test_another_run_in_the_same_place_begins_anew(tmp_path: Path) -> None:
    run = goes_on(tmp_path / "run", recorded())
    follower = RunFollower(run)
    assert rows(follower.state())["steps that ended"] == "2"
    (run / JOURNAL_NAME).rename(tmp_path / "before")
    (run / MANIFEST_NAME).unlink()
    assert follower.state()["rows"] == []
    made = HandMade()
    made.op("init", 0)
    made.alloc(0, MIB)
    other = goes_on(tmp_path / "other", made)
    for name in (JOURNAL_NAME, MANIFEST_NAME):
        (other / name).rename(run / name)
    assert rows(follower.state())["steps that ended"] == "0"
    assert rows(follower.state())["allocated, at least"] == "1.00 MiB"


def test_of_several_ranks_the_last_is_followed_until_the_page_of_all_is_written(tmp_path: Path) -> None:
    assert follower_of(tmp_path) is None
    for rank in (0, 3):
        goes_on(tmp_path / f"rank{rank}", recorded())
    build_tables(tmp_path / "rank0")
    os.utime(tmp_path / "rank0" / MANIFEST_NAME, (0, 0))
    follower = follower_of(tmp_path)
    assert follower is not None
    live = follower.state()
    assert str(live["title"]).endswith(": rank3")
    assert live["table"][0][:3] == ["0", "killed", "2"]  # type: ignore[index]
    assert live["links"] == [[["page", "rank0/report.html"]], []]
    build_tables(tmp_path / "rank3")
    assert not follower.state()["done"]  # another rank may follow
    (tmp_path / "rank3" / PAGE_NAME).write_text("<title>a rank</title>")
    (tmp_path / PAGE_NAME).write_text(report_page(runs_report(open_job_runs(tmp_path))))
    assert follower.state()["done"]
    assert "rank3/report.html" in follower.report()
    os.utime(tmp_path / PAGE_NAME, (1, 1))  # that of the ranks that were here before
    assert not follower.state()["done"]


def test_many_points_keep_their_peak() -> None:
    memory, num = LiveMemory(), 5_000
    action = bytes([ACTIONS.index("alloc"), ACTIONS.index("free_requested")] * num)
    size = np.repeat(np.where(np.arange(num) == 1_234, 7 * MIB, MIB), 2).astype("<i8")
    memory.take(
        EventsRecord(
            0,
            [],
            [],
            action=action,
            address=np.full(2 * num, 512, "<u8").tobytes(),
            size=size.tobytes(),
            stream=np.zeros(2 * num, "<u8").tobytes(),
            time_us=(np.arange(2 * num) * 1_000).astype("<i8").tobytes(),
            op=np.zeros(2 * num, "<i8").tobytes(),
            stack=np.zeros(2 * num, "<i4").tobytes(),
        )
    )
    assert len(memory.points) <= 1_000
    assert max(point[1] for point in memory.points) == 7 * MIB == memory.most_allocated
    assert memory.allocated == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(lambda: RunFollower(tmp_path / "run"), HOSTILE, 0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_the_server_has_the_live_page_its_state_and_then_the_report(server: LiveServer, tmp_path: Path) -> None:
    status, page = ask(server, server.path)
    assert (status, HOSTILE in page) == (200, False)
    assert "connect-src 'self'" in page
    for path in ("/", "/state", server.path + "other", server.path[:-1] + "state"):
        assert ask(server, path)[0] == 404
    assert ask(server, server.path + "state", host="evil.example")[0] == 404
    assert json.loads(ask(server, server.path + "state")[1])["title"].startswith("waiting")
    run = goes_on(tmp_path / "run", recorded())
    assert json.loads(ask(server, server.path + "state")[1])["title"] == "run"
    (run / JOURNAL_NAME).write_bytes(b"something else altogether")
    assert "not a journal" in json.loads(ask(server, server.path + "state")[1])["trouble"]


def test_a_run_that_ends_gives_way_to_its_report(server: LiveServer, tmp_path: Path) -> None:
    run = goes_on(tmp_path / "run", recorded())
    build_tables(run)
    assert json.loads(ask(server, server.path + "state")[1])["done"]
    assert 'id="verdict"' in ask(server, server.path)[1]
