import gzip
import json
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import ReportError, RunDirectoryError
from fakedist.results.opening import open_run
from fakedist.traces.foreign_files import kind_of, read_snapshot


class Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def test_what_torch_pickles_is_read(tmp_path: Path) -> None:
    content = {"segments": [{"address": 1}], "device_traces": [[{"action": "alloc"}]]}
    (tmp_path / "memory_snapshot.pickle").write_bytes(pickle.dumps(content))
    assert read_snapshot(tmp_path / "memory_snapshot.pickle") == content


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_wants_to_run_code_is_refused_by_its_name(tmp_path: Path, protocol: int) -> None:
    made, hostile = tmp_path / "made", tmp_path / "hostile.pickle"
    content = {"segments": [], "device_traces": [Runs(os.system, (f"touch {made}",))]}
    hostile.write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(RunDirectoryError, match=r"tries to run (posix|nt)\.system"):
        read_snapshot(hostile)
    assert not made.exists()


@pytest.mark.parametrize("call", [(eval, "1"), (getattr, (), "__class__"), (__import__, "os"), (bytearray, 9)])
def test_builtins_are_refused_too(tmp_path: Path, call: tuple[Any, ...]) -> None:
    (tmp_path / "hostile").write_bytes(pickle.dumps(Runs(call[0], call[1:])))
    with pytest.raises(RunDirectoryError, match="tries to run builtins"):
        read_snapshot(tmp_path / "hostile")


NO_SNAPSHOTS = [
    b"",
    b"text",
    b"\x80\x04",
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",  # bytes without end
    b"\x80\xff.",
    b"cos\n",
    b"(lp0\nP1\n.",  # refers to something outside
    b"(" * 1000,
    b"\x82\x01.",
    pickle.dumps({"segments": [1, 2]})[:-5],
    pickle.dumps({"segments": 3}),
    pickle.dumps({"segments": [], "device_traces": {}}),
    pickle.dumps({"a": 1}),
    pickle.dumps(7),
]


@pytest.mark.parametrize("content", NO_SNAPSHOTS)
def test_what_is_no_snapshot_is_told(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        read_snapshot(tmp_path / "x")
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"is not a memory snapshot|tries to run"):
        read_snapshot(tmp_path / "x")


def test_segments_alone_are_a_snapshot_without_a_history(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps([{"address": 1}]))
    assert read_snapshot(tmp_path / "x") == {"segments": [{"address": 1}], "device_traces": []}


SNAPSHOT = {"segments": [{"address": 1}], "device_traces": [[]]}


@pytest.mark.parametrize("packed", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("written", [pickle.dumps, lambda value: json.dumps(value).encode()], ids=["pickle", "json"])
def test_a_snapshot_is_read_as_a_pickle_or_json_by_any_name(
    written: Callable[[object], bytes], packed: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "x.anything"
    for value in (SNAPSHOT, SNAPSHOT["segments"], {"device_traces": [[]]}):
        path.write_bytes(packed(written(value)))
        assert kind_of(path) == "other"
        assert read_snapshot(path)["segments"] == (SNAPSHOT["segments"] if "address" in str(value) else [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!DOCTYPE html><html>", "is a page, which a browser opens"),
        (gzip.compress(b"\n<html>", mtime=0), "is a page, which a browser opens"),
        (b"PK\x03\x04archive/data.pkl", "is a zip archive, such as torch.save writes"),
        (b"\x28\xb5\x2f\xfd rest", "is compressed by another program than gzip"),
        (gzip.compress(b"SQLite format 3\0", mtime=0), "is a compressed SQLite file"),
        (b"[[1, 2], [3, 4]]", "is a list of lists, such as export_memory_timeline writes"),
        (b'{"allocated_bytes.all.current": 5}', "it is what torch.cuda.memory_stats() returns"),
        (pickle.dumps(OrderedDict({"allocated_bytes.all.current": 5})), "it is what torch.cuda.memory_stats() returns"),
        (b'{"schema": "1.1.1-chakra.0.0.4", "nodes": []}', "it is an execution trace of torch"),
        (b'{"version": "2.10", "entries": []}', "it is a dump of torch's Flight Recorder"),
        (pickle.dumps({"version": "2.10", "entries": []}), "it is a dump of torch's Flight Recorder"),
    ],
)
def test_what_is_known_to_be_something_else_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises((ReportError, RunDirectoryError), match=re.escape(said)):
        open_run(path)
