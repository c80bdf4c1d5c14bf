from __future__ import annotations

import argparse
import linecache
import os
import resource
import runpy
import signal
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fakedist.errors import StopRun, WorldError
from fakedist.rank import ending
from fakedist.rank.ending import Terminated
from fakedist.rundir.outcome import Ending, Outcome


def _during(error: BaseException, context: BaseException) -> BaseException:
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (StopRun(), "stopped", 0),
        (_during(SystemExit(1), StopRun()), "stopped", 0),
        (_during(RuntimeError("closing failed"), StopRun()), "stopped", 0),
        (SystemExit(), "exit", 0),
        (SystemExit(3), "exit", 3),
        (SystemExit(-1), "exit", 255),
        (SystemExit("a text"), "exit", 1),
        (Terminated(143), "interrupted", 143),
        (KeyboardInterrupt(), "interrupted", 130),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory", 4),
        (_during(RuntimeError("step failed"), torch.OutOfMemoryError()), "out_of_memory", 4),
        (_during(SystemExit(9), torch.OutOfMemoryError()), "exit", 9),
        (ValueError("first\nsecond"), "exception", 1),
    ],
)
def test_what_the_script_raised_says_how_it_ended(error: BaseException, outcome: str, code: int) -> None:
    found = ending.how_it_ended(error)
    assert (found.outcome, found.code) == (outcome, code)
    assert "\n" not in found.message


def test_sigterm_because_the_parent_was_killed_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 0)  # differs from the real parent, even if that is init
    killed = Ending(Outcome.KILLED, 143, "with fakedist profile, which was killed")
    assert ending.how_it_ended(Terminated(143)) == killed


def test_where_the_script_left_is_its_own_line_not_the_librarys(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text("import argparse\ndef leave():\n    argparse.ArgumentParser().parse_args(['--help'])\nleave()\n")
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script))
    assert ending.line_of(left.value) == f"{script}:3 (leave)"
    assert ending.line_of(SystemExit(0)) == ""


def test_os_exit_is_seen_before_it_happens_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", lambda status: codes.append(-status))
    original = os._exit
    with ending.watched_exit(codes.append):
        os._exit(7)
    assert codes == [7, -7]
    assert os._exit is original


def test_signals_wait_until_the_records_are_written() -> None:
    written = []

    def write() -> None:
        with ending.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            written.append("record")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert written


_OUR_CODE = """
def hook(tensor): return {}[tensor]
def calls_torch(tensor): return tensor.view(7)
def refuses(tensor): raise ValueError("torch's own text")
def passes_on(function, *args): return function(*args)
def wraps(original, value):
    return original(value)
def calls_back(function): return sorted([1, 2], key=function)
"""


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("ours.hook(torch.ones(3))", "fakedist/rank/ours.py:2 (hook)"),
        ("ours.calls_torch(torch.ones(3))", "fakedist/rank/ours.py:3 (calls_torch)"),
        ("ours.refuses(torch.ones(3))", ""),
        ("ours.passes_on(torch.ones(3).view, 7)", ""),
        ("ours.wraps(torch.ones(3).view, 7)", ""),
        ("ours.calls_back(lambda value: {}[value])", ""),
        ("ours.passes_on(ours.hook, torch.ones(3))", "fakedist/rank/ours.py:2 (hook)"),
        ("torch.ones(3).view(7)", ""),
    ],
)
def test_an_error_at_a_frame_of_ours_is_our_fault_unless_it_is_raised_or_passed_on(
    monkeypatch: pytest.MonkeyPatch, call: str, fault: str
) -> None:
    ours = types.ModuleType("ours")  # one of fakedist's, that exists for this test alone
    path = str(Path(ending.__file__).with_name("ours.py"))
    monkeypatch.setitem(linecache.cache, path, (len(_OUR_CODE), None, _OUR_CODE.splitlines(keepends=True), path))
    exec(compile(_OUR_CODE, path, "exec"), ours.__dict__)
    with pytest.raises((KeyError, ValueError, RuntimeError)) as caught:
        exec(compile(call, "script.py", "exec"), {"ours": ours, "torch": torch})
    assert ending.fault_of(caught.value) == fault
    found = ending.how_it_ended(caught.value)
    assert found.outcome is (Outcome.FAULT if fault else Outcome.EXCEPTION)
    assert found.message.endswith(f", in {fault}") == bool(fault)
    assert ending.fault_of(WorldError("it waits", "--rank 0")) == ending.fault_of(MemoryError()) == ""
    wrapped = _during(RuntimeError("the script's"), caught.value)
    assert ending.how_it_ended(wrapped).outcome is found.outcome


@pytest.mark.parametrize(("module", "is_hub"), [("kernels.load", True), ("my_kernels.load", False)])
def test_a_kernel_that_cannot_be_fetched_says_how_to_have_it(module: str, is_hub: bool) -> None:
    package: dict[str, Any] = {"__name__": module}
    exec("def get_kernel(name):\n    raise ValueError('no publisher')", package)
    with pytest.raises(ValueError, match="no publisher") as caught:
        package["get_kernel"]("kernels-community/relu")
    message = ending.how_it_ended(_during(RuntimeError("the script's"), caught.value)).message
    assert message.startswith("RuntimeError: the script's")
    assert message.endswith("or name a copy: LOCAL_KERNELS=REPOSITORY=DIRECTORY)") == is_hub


def test_signals_to_this_process_are_seen_before_they_are_sent_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    for owner, name in ((os, "kill"), (os, "killpg"), (os, "abort"), (signal, "raise_signal")):
        monkeypatch.setattr(owner, name, lambda *args, name=name: sent.append((name, 0)))
    originals = (os.kill, os.killpg, os.abort, signal.raise_signal)
    with ending.watched_signals(lambda number: sent.append(("seen", number))):
        os.kill(os.getpid(), signal.SIGSEGV)
        os.kill(os.getppid(), signal.SIGTERM)
        os.killpg(os.getpgrp(), signal.SIGTERM)
        signal.raise_signal(signal.SIGBUS)
        os.abort()
    assert sent == [
        *(("seen", signal.SIGSEGV), ("kill", 0), ("kill", 0)),
        *(("seen", signal.SIGTERM), ("killpg", 0)),
        *(("seen", signal.SIGBUS), ("raise_signal", 0)),
        *(("seen", signal.SIGABRT), ("abort", 0)),
    ]
    assert (os.kill, os.killpg, os.abort, signal.raise_signal) == originals


def test_an_argument_parser_says_why_it_left() -> None:
    parser = argparse.ArgumentParser(prog="train.py")
    with pytest.raises(SystemExit) as left:
        parser.parse_args(["--force"])
    assert ending.how_it_ended(left.value).message == "unrecognized arguments: --force"
    assert ending.how_it_ended(SystemExit(2)).message == ""


@pytest.mark.parametrize(
    ("limit", "num_bytes", "error", "says"),
    [
        (resource.RLIM_INFINITY, 0, MemoryError(), None),
        (4 << 30, 0, None, None),
        (4 << 30, 0, ValueError("no"), None),
        (
            4 << 30,
            0,
            _during(ImportError(""), ImportError("a.so: failed to map segment from shared object")),
            "space: ",
        ),
        (4 << 30, 0, MemoryError(), "this machine gave no address space: ulimit -v allows 4.00 GiB, in which"),
        (
            4 << 30,
            1 << 30,
            None,
            "this machine gave no address space for 1.00 GiB: ulimit -v allows 4.00 GiB, in which",
        ),
        (
            resource.RLIM_INFINITY,
            1 << 30,
            None,
            "this machine gave no address space for 1.00 GiB: it may have too many",
        ),
    ],
)
def test_what_the_machine_lacks_is_its_own_error(
    monkeypatch: pytest.MonkeyPatch, limit: int, num_bytes: int, error: BaseException | None, says: str | None
) -> None:
    monkeypatch.setattr(ending.resource, "getrlimit", lambda _: (limit, limit))
    lack = ending.lack_of_machine(num_bytes, error)
    assert (lack is None) is (says is None)
    if lack is not None and says is not None:
        assert says in lack.message
        assert (lack.hint == "ulimit -v unlimited") is (limit != resource.RLIM_INFINITY)
