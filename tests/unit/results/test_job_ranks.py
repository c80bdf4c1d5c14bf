"""Jobs whose ranks run here one after the other, each among faked others, and what matching their calls finds.

Dumps of torch's Flight Recorder, in the form of torch 2.11's `_dump_nccl_trace` and of 2.15's JSON.

The entries are made here. tests/integration/test_flight_recorder.py has torch write them, from processes of gloo.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakedist.analysis.call_order import CallsMatch, RankCalls, match_calls
from fakedist.analysis.recording import JournalReading, Recording
from fakedist.analysis.topology import call_table, group_table, other_group_table, term_table
from fakedist.errors import ReportError
from fakedist.options import Job
from fakedist.rank.frameworks.adapting import adapted_frameworks
from fakedist.record.ledger import Ledger
from fakedist.report.content.match import sections, verdict
from fakedist.results.job_ranks import JobMatch, groups_in_turn, job_calls, match_dumps
from fakedist.rundir.encoding import Record
from fakedist.traces.flight_recorder import dumps_among
from fakedist.world.reroute import fake_world

WORLD = 4
Script = Callable[[int], None]


def recording_of(script: Script, rank: int, world_size: int = WORLD) -> Recording:
    """The calls of a rank of a script until its end, and its groups."""
    records: list[Record] = []
    ledger = Ledger(records.append, lambda: (0, 0), lambda *_: None, lambda *_: None)
    with fake_world(Job(world_size=world_size, rank=rank, target="x"), ledger):
        dist.init_process_group("gloo")
        script(rank)
        ledger.flush()
    reading = JournalReading()
    for record in records:
        reading.take(record)
    reading.join()
    return reading.recording


def program_of(recording: Recording, rank: int) -> RankCalls:
    calls = job_calls(call_table(recording), term_table(recording), group_table(recording)["ranks"].tolist())
    return RankCalls(rank, calls, last_step=0, is_over=True)


def matched(script: Script, *ranks: int) -> CallsMatch:
    return match_calls([program_of(recording_of(script, rank), rank) for rank in ranks or range(WORLD)])


def ones(number: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(number, dtype=dtype)


def pairs() -> list[dist.ProcessGroup]:
    made: list[dist.ProcessGroup] = [dist.new_group([rank, rank + 1]) for rank in (0, 2)]
    return made


# ---- jobs that hang or end in wrong values, and how each is mended: the same with a True


def one_stage_skips_an_all_reduce(rank: int, mended: bool) -> None:
    group = pairs()[rank // 2]
    for _ in range(2):
        if mended or rank != 3:
            dist.all_reduce(ones(), group=group)
        dist.all_reduce(ones())


def groups_are_swapped(rank: int, mended: bool) -> None:
    first, second = pairs()[rank // 2], dist.new_group(range(WORLD))
    order = [first, second] if mended or rank % 2 == 0 else [second, first]
    for group in order:
        dist.all_reduce(ones(), group=group)


def the_last_batch_is_incomplete(rank: int, mended: bool) -> None:
    for number in (8, 8, 3 if rank == 2 and not mended else 8):
        gathered = ones(number * WORLD)
        dist.all_gather_into_tensor(gathered, ones(number))


def rank_0_alone_is_in_a_barrier(rank: int, mended: bool) -> None:
    if rank == 0 or mended:
        dist.barrier()
    dist.all_reduce(ones())


def some_ranks_evaluate(rank: int, mended: bool) -> None:
    dist.all_reduce(ones())
    if rank < 2 or mended:
        dist.all_reduce(ones())


def two_ranks_receive_first(rank: int, mended: bool) -> None:
    """Each waits in a broadcast of its own for the other."""
    first, second = pairs()[rank // 2], dist.new_group([0, 1, 2, 3])
    if rank % 2 == 0 or mended:
        dist.broadcast(ones(), src=rank - rank % 2, group=first)
        dist.broadcast(ones(), src=0, group=second)
    else:
        dist.broadcast(ones(), src=0, group=second)
        dist.broadcast(ones(), src=rank - 1, group=first)


JOBS = [
    one_stage_skips_an_all_reduce,
    groups_are_swapped,
    the_last_batch_is_incomplete,
    rank_0_alone_is_in_a_barrier,
    some_ranks_evaluate,
    two_ranks_receive_first,
]


@pytest.mark.parametrize("job", JOBS)
def test_a_faulty_job_is_found_and_matches_once_it_is_mended(job: Callable[[int, bool], None]) -> None:
    assert not matched(lambda rank: job(rank, False)).is_matched
    mended = matched(lambda rank: job(rank, True))
    assert mended.is_matched
    assert mended.num_calls > 0


def test_who_waits_for_whom_in_which_call() -> None:
    waiting = matched(lambda rank: one_stage_skips_an_all_reduce(rank, False)).waiting
    found = {wait.made.rank: (wait.made.call.members, wait.missing) for wait in waiting}
    assert found == {0: ((0, 1, 2, 3), (2,)), 1: ((0, 1, 2, 3), (2,)), 2: ((2, 3), (3,)), 3: ((0, 1, 2, 3), (2,))}


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda odd: dist.all_reduce(ones(dtype=torch.float64 if odd else torch.float32)), "dtype"),
        (lambda odd: dist.all_reduce(ones(3 if odd else 2)), "bytes"),
        (lambda odd: dist.all_reduce(ones(), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM), "reduction"),
        (lambda odd: dist.broadcast(ones(), src=1 if odd else 0), "root"),
        (lambda odd: dist.all_reduce(ones()) if odd else dist.broadcast(ones(), src=0), "operation"),
        (lambda odd: dist.reduce(ones(), dst=2 if odd else 3), "root"),
        (lambda odd: dist.reduce_scatter_tensor(ones(2 if odd else 1), ones(8 if odd else 4)), "bytes"),
        (lambda odd: dist.all_to_all_single(ones(8 if odd else 4), ones(8 if odd else 4)), "bytes"),
    ],
)
def test_calls_that_meet_differ(call: Callable[[bool], object], what: str) -> None:
    difference = matched(lambda rank: call(rank == 2) and None).difference
    assert difference is not None
    assert difference.what == what
    assert 2 in [made.rank for made in difference.calls]


def test_an_all_gather_of_a_list_meets_one_into_a_tensor() -> None:
    def script(rank: int) -> None:
        if rank:
            dist.all_gather_into_tensor(ones(8), ones())
        else:
            dist.all_gather([ones() for _ in range(WORLD)], ones())

    assert matched(script).is_matched


@pytest.mark.parametrize(
    ("is_told", "of_rank_1", "is_matched"), [(1, (2,) * 4, 1), (0, (2,) * 4, 0), (1, (1, 2, 2, 2), 0)]
)
def test_uneven_parts_of_an_all_to_all_are_not_proved_if_a_rank_may_have_been_told(
    is_told: int, of_rank_1: tuple[int, ...], is_matched: int
) -> None:
    """Before a small call a rank has only its own sizes; in one, all others send it what it would send itself."""

    def script(rank: int) -> None:
        sent = [1, 3 if rank == 0 else 2, 3, 4]
        received = list(of_rank_1) if rank == 1 else [1 + rank] * WORLD
        if is_told:
            dist.all_to_all_single(ones(4), ones(4))
        dist.all_to_all_single(ones(sum(received)), ones(sum(sent)), received, sent)

    found = matched(script)
    assert (found.is_matched, len(found.unproved)) == (is_matched, is_matched)
    (meeting,) = found.unproved or [found.difference]
    assert meeting is not None
    assert [made.rank for made in meeting.calls] == [0, 1]


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (lambda rank: ([0, 1], [2, 3])[:: 1 if rank % 2 else -1], {0: "2,3", 1: "0,1", 2: "2,3", 3: "0,1"}),
        (lambda rank: ([0, 1],) if rank < 2 else (), {0: "0,1", 1: "0,1", 2: "none", 3: "none"}),
        (lambda rank: ([0, 1], [2, 3]), {}),
    ],
)
def test_ranks_make_the_same_groups_in_one_order(
    members: Callable[[int], tuple[list[int], ...]], told: dict[int, str]
) -> None:
    runs = {}
    for rank in range(WORLD):
        made = recording_of(lambda rank: [dist.new_group(ranks) for ranks in members(rank)].clear(), rank)
        tables = {"groups": group_table(made), "other_groups": other_group_table(made)}
        summary = SimpleNamespace(exit=SimpleNamespace(ended_by_itself=True))
        runs[rank] = SimpleNamespace(table=tables.get, summary=summary)
    found = groups_in_turn(runs)  # type: ignore[arg-type]
    assert found.keys() == told.keys()
    assert all(told[rank] in text for rank, text in found.items())


@pytest.mark.parametrize("is_async", [True, False])
def test_sends_meet_receives_of_their_tag(is_async: bool) -> None:
    """Gloo sends nothing before its receive begins: both hosts wait, unless they do so for all at the end."""
    send, receive = (dist.isend, dist.irecv) if is_async else (dist.send, dist.recv)

    def script(rank: int) -> None:
        calls: list[object] = []
        if rank == 0:
            calls = [send(ones(1), 1, tag=7), send(ones(2), 1, tag=8)]
        elif rank == 1:
            calls = [receive(ones(2), 0, tag=8), receive(ones(1), 0, tag=7)]
        for call in calls if is_async else ():
            call.wait()

    assert matched(script).is_matched == is_async


@pytest.mark.parametrize(("number", "is_matched"), [(2, True), (3, False)])
def test_a_send_is_as_large_as_its_receive(number: int, is_matched: bool) -> None:
    def script(rank: int) -> None:
        if rank == 0:
            dist.send(ones(2), 1)
        elif rank == 1:
            dist.recv(ones(number), 0)

    assert matched(script).is_matched == is_matched


def test_a_receive_without_its_send_waits_for_the_sender() -> None:
    (waiting,) = matched(lambda rank: dist.recv(ones(), 2) and None if rank == 1 else None).waiting
    assert (waiting.made.rank, waiting.missing) == (1, (2,))


def test_ranks_without_a_run_are_taken_to_agree() -> None:
    script: Script = lambda rank: one_stage_skips_an_all_reduce(rank, False)  # noqa: E731
    assert matched(script, 0, 1).is_matched
    assert matched(script, 0, 2).is_matched  # rank 3, whose fault it is, may call anything
    assert not matched(script, 2, 3).is_matched


def test_a_second_group_of_the_same_ranks_is_another_one() -> None:
    def script(rank: int) -> None:
        groups = [dist.new_group(range(WORLD)) for _ in range(2)]
        dist.all_reduce(ones(), group=groups[rank == 3])

    assert not matched(script).is_matched


def test_synchronous_sends_and_receives_hold_up_the_host_of_gloo() -> None:
    """The order of match's own page: rank 1 receives before its all_reduce, rank 0 sends after it."""

    def script(rank: int, receive: Callable[..., object]) -> None:
        if rank == 1:
            receive(ones(), 0)
        dist.all_reduce(ones())
        if rank == 0:
            dist.send(ones(), 1)

    assert not matched(lambda rank: script(rank, dist.recv)).is_matched
    assert matched(lambda rank: script(rank, dist.irecv)).is_matched


def test_parts_of_a_coalesced_call_are_compared_one_by_one() -> None:
    def script(rank: int, sizes: tuple[int, int]) -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            for size in sizes:
                dist.all_reduce(ones(size))
        manager.wait()

    difference = matched(lambda rank: script(rank, (3, 5) if rank != 2 else (5, 3))).difference
    assert difference is not None
    assert difference.what == "parts"
    assert matched(lambda rank: script(rank, (3, 5))).is_matched


@pytest.mark.parametrize(("others", "is_matched"), [("none", True), ("own", False)])
def test_ranks_with_uneven_inputs_match_in_a_join(others: str, is_matched: bool) -> None:
    def script(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        with ddp.join():
            for _ in range(1 + rank):
                ddp(torch.ones(2, 4)).sum().backward()
                if others == "own":  # which no rank without inputs makes
                    dist.all_reduce(ones())
        dist.all_reduce(ones())

    with adapted_frameworks():
        assert matched(script).is_matched == is_matched


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
    for name in ("_reduce_scatter_base", "an_operation_of_a_later_torch"):
        other = {0: [entry(1, "all_reduce", group="5")], 1: [entry(1, name, group="5")]}
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


def test_a_call_that_is_not_over_may_wait_for_a_rank_without_a_dump(tmp_path: Path) -> None:
    stuck = [entry(1, "all_reduce"), entry(2, "broadcast", state="started")]
    paths = write(tmp_path, {0: stuck, 2: stuck})
    for dumps, ranks, lacking in (
        (paths, "2 ranks match, and ranks 0,2 hang", "rank 1"),
        (paths[:1], "1 rank match, and rank 0 hangs", "ranks 1,2"),
    ):
        found = match_dumps(dumps)
        assert verdict(found) == f"the calls of {ranks}"
        ((title, _),) = sections(found)
        assert title.startswith(f"Not over: {lacking} may never have made them, or")


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
