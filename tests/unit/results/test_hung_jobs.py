"""Dumps of torch's Flight Recorder, in the form of torch 2.11's `_dump_nccl_trace` and of 2.15's JSON.

The entries are made here. tests/integration/test_flight_recorder.py has torch write them, from processes of gloo.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from fakedist.errors import JobError, ReportError
from fakedist.results.job_ranks import JobMatch, match_dumps
from fakedist.traces.flight_recorder import dumps_among

GROUPS = {"0": ("default_pg", [0, 1, 2]), "5": ("tp", [0, 1])}


C10D = "/v/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def entry(
    number: int, name: str, size: int = 8, *, group: str = "0", state: str = "completed", **more: Any
) -> dict[str, Any]:
    line = {"name": "step", "filename": "/job/train.py", "line": 10 + number}
    tensors = {
        f"{side}_{what}": value
        for side in ("input", "output")
        for what, value in (("sizes", [[size]]), ("dtypes", ["BFloat16"]))
    }
    return {
        "profiling_name": f"nccl:{name}", "process_group": (group, GROUPS[group][0]), "collective_seq_id": number,
        "p2p_seq_id": 0, "is_p2p": False, "state": state, "retired": False, "record_id": number, **tensors,
        "frames": [{"name": "all_reduce", "filename": C10D, "line": 4000}, line],
        **more,
    }  # fmt: skip


def p2p(number: int, name: str, state: str, **more: Any) -> dict[str, Any]:
    return entry(number, name, state=state, p2p_seq_id=number, is_p2p=True, **more)


def write(folder: Path, ranks: dict[int, list[dict[str, Any]]], *, as_json: bool = False) -> list[Path]:
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in GROUPS.items()}
    paths = []
    for rank, entries in ranks.items():
        dump = {"version": "2.5", "pg_config": config, "pg_status": {}, "entries": entries}
        path = folder / f"nccl_trace_rank_{rank}{'.json' if as_json else ''}"
        path.write_bytes(json.dumps(dump).encode() if as_json else pickle.dumps(dump))
        paths.append(path)
    return paths


def waiting(match: JobMatch) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(wait.made.rank, wait.made.call.operation, wait.missing) for wait in match.matched.waiting]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_that_never_calls_is_who_the_others_wait_for(tmp_path: Path, as_json: bool) -> None:
    done = [entry(1, "all_reduce"), entry(2, "_all_gather_base")]
    stuck = entry(3, "all_reduce", 16, state="started")
    match = match_dumps(write(tmp_path, {0: [*done, stuck], 1: [*done, stuck], 2: done}, as_json=as_json))
    assert waiting(match) == [(0, "all_reduce", (2,)), (1, "all_reduce", (2,))]
    place = match.placed(match.at_fault[0])
    assert (place.group, place.lines) == ("default_pg (0) (ranks 0-2)", ["/job/train.py:13 (step)"])
    assert place.made.call.bytes_in == 32


def test_calls_that_meet_and_differ_are_named(tmp_path: Path) -> None:
    match = match_dumps(
        write(
            tmp_path, {0: [entry(1, "all_reduce", 8)], 1: [entry(1, "all_reduce", 9)], 2: [entry(1, "all_reduce", 8)]}
        )
    )
    assert match.matched.difference is not None
    assert match.matched.difference.what == "bytes"
    other = {0: [entry(1, "all_reduce", group="5")], 1: [entry(1, "_reduce_scatter_base", group="5")]}
    match = match_dumps(write(tmp_path, other))
    assert match.matched.difference is not None
    assert match.matched.difference.what == "operation"
    assert [made.rank for made in match.at_fault] == [0, 1]


def test_rings_that_lost_different_beginnings_are_compared_from_where_all_have_them(tmp_path: Path) -> None:
    calls = [entry(number, "all_reduce", size) for number, size in enumerate((4, 8, 16, 32, 64), 1)]
    match = match_dumps(write(tmp_path, {0: calls, 1: calls[2:], 2: calls[1:]}))
    assert match.matched.is_matched
    assert match.matched.num_calls == 9


def test_ranks_without_a_dump_are_assumed_to_match(tmp_path: Path) -> None:
    calls = [entry(1, "all_reduce")]
    match = match_dumps(write(tmp_path, {0: calls, 2: calls}))
    assert match.matched.is_matched
    assert match.not_recorded == [1]


def test_what_every_rank_is_in_and_none_is_through_is_not_a_mismatch(tmp_path: Path) -> None:
    stuck = [entry(1, "all_reduce"), entry(2, "broadcast", state="started")]
    match = match_dumps(write(tmp_path, dict.fromkeys(range(3), stuck)))
    assert match.matched.is_matched
    assert [(made.rank, made.call.operation) for made in match.in_flight] == [(rank, "broadcast") for rank in range(3)]


def test_a_receive_waits_for_its_send(tmp_path: Path) -> None:
    sent = p2p(1, "send 0->1", "completed", group="5")
    received = p2p(1, "recv 1<-0", "completed", group="5")
    match = match_dumps(write(tmp_path, {0: [sent], 1: [received, p2p(2, "recv 1<-0", "started", group="5")]}))
    assert waiting(match) == [(1, "recv", (0,))]


def test_all_to_all_of_unknown_parts_differs_in_nothing(tmp_path: Path) -> None:
    match = match_dumps(write(tmp_path, {rank: [entry(1, "all_to_all", 8 + rank)] for rank in range(3)}))
    assert match.matched.is_matched


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("echo ran",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Evil()), "tries to run posix.system"),
        (b"", "is not a dump"),
        (b"{", "is not a dump"),
        (pickle.dumps([1]), "it has no entries"),
        (pickle.dumps({"entries": [1]}), "is not a dump"),
        (pickle.dumps({"entries": [entry(1, "all_reduce") | {"collective_seq_id": "x"}]}), "is not a dump"),
        (pickle.dumps({"entries": [entry(1, "all_reduce") | {"input_sizes": [[-1]]}]}), "is not a dump"),
        (pickle.dumps({"entries": [entry(1, "all_reduce") | {"input_sizes": [[1 << 62]]}]}), "is not a dump"),
        (pickle.dumps({"entries": [entry(1, "all_reduce") | {"process_group": 3}]}), "is not a dump"),
    ],
)
def test_files_that_are_no_dumps_are_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    good, bad = write(tmp_path, {0: [entry(1, "all_reduce")], 1: []})
    bad.write_bytes(content)
    with pytest.raises(ReportError, match=said):
        match_dumps([good, bad])


def test_files_are_named_after_their_ranks(tmp_path: Path) -> None:
    paths = write(tmp_path, {0: [], 1: []})
    assert dumps_among([tmp_path]) == paths
    assert dumps_among([tmp_path, tmp_path / "missing"]) == []
    with pytest.raises(JobError, match="dump of one rank"):
        match_dumps(paths[:1])
    with pytest.raises(ReportError, match="second file of rank 0"):
        match_dumps([paths[0], paths[0]])
    other = paths[0].rename(tmp_path / "dump")
    with pytest.raises(ReportError, match="does not end with its rank"):
        match_dumps([other, paths[1]])


@pytest.mark.parametrize("as_json", [False, True])
def test_one_file_may_have_the_dumps_of_several_ranks(tmp_path: Path, as_json: bool) -> None:
    done = [entry(1, "all_reduce")]
    stuck = entry(2, "all_reduce", 16, state="started")
    paths = write(tmp_path, {0: [*done, stuck], 1: [*done, stuck], 2: done}, as_json=True)
    dumps = {str(rank): json.loads(path.read_bytes()) for rank, path in enumerate(paths)}
    whole = tmp_path / ("all.json.gz" if as_json else "all")
    whole.write_bytes(gzip.compress(json.dumps(dumps).encode()) if as_json else pickle.dumps(dumps))
    match = match_dumps([whole])
    assert waiting(match) == [(0, "all_reduce", (2,)), (1, "all_reduce", (2,))]


def test_a_dump_of_torch_2_3_has_one_count_and_no_names_of_groups(tmp_path: Path) -> None:
    calls = [entry(1, "all_reduce"), entry(2, "broadcast")]
    for call in calls:
        del call["process_group"]
        call |= {"pg_id": 0, "seq_id": call.pop("collective_seq_id")}
    match = match_dumps(write(tmp_path, {0: calls, 1: calls}))
    assert match.matched.is_matched
    assert match.matched.num_calls == 4


def test_the_rank_in_a_dump_counts_for_more_than_its_name(tmp_path: Path) -> None:
    first, second = write(tmp_path, {0: [entry(1, "all_reduce")], 5: [entry(1, "all_reduce")]})
    dump = pickle.loads(second.read_bytes())
    second.write_bytes(pickle.dumps(dump | {"rank": 1}))
    assert match_dumps([first, second]).ranks == [0, 1]
