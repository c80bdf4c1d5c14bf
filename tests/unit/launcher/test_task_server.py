from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fakedist.launcher.executors.process import Order, Supervised, start_supervisor
from fakedist.launcher.machine import descendants

ROOT = Path(__file__).parents[3]
# Programs whose argument is what they do. ``HOW`` says whether they forked.
_RUN = "import os, signal, sys, time\nexec(sys.argv[2])\n"
_OWN = f"HOW = 'own'\n{_RUN}"
_SERVER = """
import os, socket, sys
sys.path[0] = sys.argv[1]
from fakedist.rank.fork_server import can_fork, end_with_parent, serve
end_with_parent(9)
{import_}
sys.argv[2:] = serve(socket.socket(fileno=int(sys.argv[2])), serves=can_fork())[0]["arguments"]
HOW = 'forked'
"""
_THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"


class Supervisor:
    """A supervisor, and what it was last told."""

    def __init__(self, place: Path, import_: str = "pass") -> None:
        self._place = place
        self._server = [sys.executable, "-S", "-c", f"{_SERVER.format(import_=import_)}{_RUN}", str(ROOT)]
        self.process: subprocess.Popen[bytes] = start_supervisor(place)

    def tell(self, statement: str, **options: object) -> None:
        order = Order(
            command=[sys.executable, "-S", "-c", _OWN, str(ROOT)],
            environment={"PATH": os.environ["PATH"], "WHERE": "here"},
            cwd=str(self._place),
            log=str(self._place / "out"),
            memory_limit_bytes=None,
            timeout_s=None,
            arguments=[statement],
            server=self._server,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(replace(order, **options))).encode() + b"\n")  # type: ignore[arg-type]
        self.process.stdin.flush()

    def hear(self) -> Supervised:
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, (self._place / "log").read_text()
        return Supervised(**json.loads(said))

    def run(self, statement: str, **options: object) -> tuple[Supervised, list[str]]:
        self.tell(statement, **options)
        return self.hear(), (self._place / "out").read_text().split()

    def close(self) -> None:
        with self.process:
            assert self.process.stdin is not None
            with suppress(OSError):
                self.process.stdin.close()


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with closing(Supervisor(tmp_path)) as made:
        made.run("pass")
        yield made


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_programs_fork_from_the_second_on(tmp_path: Path) -> None:
    with closing(Supervisor(tmp_path)) as supervisor:
        assert [supervisor.run("print(HOW)")[1] for _ in range(3)] == [["own"], ["forked"], ["forked"]]


def test_a_fork_is_as_if_it_had_been_started(supervisor: Supervisor, tmp_path: Path) -> None:
    sees = "os.getcwd(), os.environ, sys.stdin.read(), os.getpid() == os.getsid(0)"
    looks = f"print(HOW, {sees}, os.listdir('/proc/self/fd'), sys.argv, sep='|'); sys.exit(7)"
    (tmp_path / "other").mkdir()
    (forked, said), (own, said_by_own) = (
        supervisor.run(looks, cwd=str(tmp_path / "other"), **more) for more in ({}, {"server": []})
    )
    assert " ".join(said).replace("forked", "own") == " ".join(said_by_own)
    assert said[0].startswith("forked|")
    assert (forked.ended, forked.code) == (own.ended, own.code) == ("itself", 7)
    assert 0 < forked.peak_rss_bytes < 1 << 30


@pytest.mark.parametrize(
    ("statement", "options", "ended", "code"),
    [
        ("held = b'x' * (96 << 20); time.sleep(60)", {"memory_limit_bytes": 64 << 20}, "memory", -signal.SIGKILL),
        ("time.sleep(60)", {"timeout_s": 0.3}, "timeout", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGBUS)", {}, "itself", -signal.SIGBUS),
    ],
)
def test_a_fork_is_watched(
    supervisor: Supervisor, statement: str, options: dict[str, object], ended: str, code: int
) -> None:
    found, said = supervisor.run(f"print(HOW, flush=True); {statement}", **options)
    assert (said, found.ended, found.code) == (["forked"], ended, code)
    assert supervisor.run("print(HOW)")[1] == ["forked"]


def test_what_a_fork_leaves_behind_is_ended_and_the_server_stays(supervisor: Supervisor) -> None:
    _, (left,) = supervisor.run(
        "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    )
    assert not is_alive(int(left))
    assert supervisor.run("print(HOW)")[1] == ["forked"]


def test_a_fork_with_another_environment_starts_on_its_own(supervisor: Supervisor) -> None:
    supervisor.run("pass")
    assert supervisor.run("print(HOW)", environment={"PATH": os.environ["PATH"], "WHERE": "there"})[1] == ["own"]
    assert supervisor.run("print(HOW)")[1] == ["forked"]


@pytest.mark.parametrize("import_", [_THREAD, "import missing", "os.kill(os.getpid(), 9)"])
def test_nothing_forks_from_a_server_that_cannot_serve(tmp_path: Path, import_: str) -> None:
    with closing(Supervisor(tmp_path, import_)) as supervisor:
        assert [supervisor.run("print(HOW)")[1] for _ in range(3)] == [["own"]] * 3


def test_a_fork_ends_even_with_a_killed_supervisor(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.tell("print(os.getpid(), flush=True); time.sleep(60)")
    while not (told := (tmp_path / "out").read_text()).endswith("\n"):
        time.sleep(0.01)
    below = descendants(supervisor.process.pid)
    assert int(told) in below
    supervisor.process.kill()
    supervisor.process.wait()
    until = time.monotonic() + 20
    while any(map(is_alive, below)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_alive, below))
