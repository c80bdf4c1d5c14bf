"""Tapes: what one rank sent answers another's receives, also while it still runs."""

import dataclasses
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fakedist.errors import RunDirectoryError, WorldError
from fakedist.options import Job
from fakedist.rundir.directory import (
    TAPE_NAME,
    JournalWriter,
    create_run_directory,
    load_manifest,
    new_manifest,
    read_journal,
    write_manifest,
)
from fakedist.rundir.encoding import Record
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.tape import (
    MAX_TENSOR_BYTES,
    TAPE_RECORDS,
    GroupRecord,
    MovedFile,
    SentRecord,
    StoredRecord,
    Tape,
    find_tapes,
    script_identity,
)
from fakedist.world.reroute import fake_world
from fakedist.world.tapes import Reader, Tapes, Where, Writer
from tests.unit.analysis.recorded import write_plain


@contextmanager
def rank(number: int, directory: Path, *others: int, **job: Any) -> Iterator[Tapes]:
    """Be a rank of four: with a tape in ``directory/N``, and answered from the tapes there of other ranks."""
    (directory / str(number)).mkdir(exist_ok=True)
    (directory / str(number) / TAPE_NAME).unlink(missing_ok=True)
    writer = JournalWriter(directory / str(number) / TAPE_NAME)
    tapes = Tapes(writer.append, None, [Tape(directory / str(other), other) for other in others], number)
    with fake_world(Job(world_size=4, rank=number, target="x", **job), tapes=tapes):
        dist.init_process_group("gloo")
        yield tapes
    tapes.close()
    writer.close()


def broadcast(tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
    dist.broadcast(tensor, source)
    return tensor


def receive(tensor: torch.Tensor, source: int | None = 0, tag: int = 0) -> torch.Tensor:
    dist.recv(tensor, source, tag=tag)
    return tensor


TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 5)], ids=str)
def test_a_broadcast_arrives_with_its_values(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.rand(shape) * 3).to(dtype)
    with rank(0, tmp_path):
        broadcast(sent)
    with rank(2, tmp_path, 0):
        got = broadcast(torch.zeros(shape, dtype=dtype))
    assert got.view(torch.uint8).tolist() == sent.view(torch.uint8).tolist() if shape else got.item() == sent.item()


def test_without_a_tape_the_buffer_stays_and_what_is_received_is_made_up(tmp_path: Path) -> None:
    with rank(2, tmp_path):
        assert broadcast(torch.full((2,), 5.0)).tolist() == [5.0, 5.0]
        assert receive(torch.full((2,), 5)).tolist() == [0, 0]
    with rank(0, tmp_path):
        broadcast(torch.ones(2))
    with rank(1, tmp_path, 0, collectives="noop"):
        assert broadcast(torch.zeros(2)).tolist() == [0, 0]


def test_each_rank_is_scattered_its_own(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        dist.scatter(torch.zeros(2), [torch.full((2,), float(each)) for each in range(4)], src=0)
    for other in (1, 3):
        with rank(other, tmp_path, 0):
            dist.scatter(got := torch.zeros(2), None, src=0)
            assert got.tolist() == [other, other]


def test_sends_arrive_in_order_at_their_receiver_alone_and_in_any_shape_of_their_size(tmp_path: Path) -> None:
    with rank(1, tmp_path):
        for number in (1, 2):
            dist.send(torch.tensor([number, 3]), 3)
            dist.send(torch.tensor([number, 2]), 2)
        dist.send(torch.arange(4), 2)
    with rank(2, tmp_path, 1):
        assert [receive(torch.zeros(2, dtype=torch.int64), 1).tolist() for _ in range(2)] == [[1, 2], [2, 2]]
        assert receive(torch.zeros((2, 2), dtype=torch.int64), 1).tolist() == [[0, 1], [2, 3]]


def nccl_on_the_host() -> Any:
    """A group whose tensors on the host are NCCL's: there is no GPU here."""
    group: Any = dist.new_group([0, 2], backend="nccl")
    group._by_device["cpu"] = "nccl"
    return group


def test_tags_choose_among_gloos_sends_and_not_among_nccls(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        nccl: Any = nccl_on_the_host()
        for tag in (7, 8):
            dist.send(torch.tensor([tag]), 2, tag=tag)
            dist.send(torch.tensor([tag]), 2, group=nccl, tag=tag)
    with rank(2, tmp_path, 0):
        nccl = nccl_on_the_host()
        assert receive(torch.tensor([0]), tag=8).item() == 8
        assert receive(torch.tensor([0]), tag=7).item() == 7
        first = torch.tensor([0])
        dist.recv(first, 0, group=nccl, tag=8)
        assert first.item() == 7


def test_a_receive_from_anywhere_finds_the_rank_that_sent(tmp_path: Path) -> None:
    with rank(3, tmp_path):
        dist.send(torch.tensor([9]), 2)
    with rank(1, tmp_path):
        pass
    with rank(2, tmp_path, 1, 3):
        got = torch.tensor([0])
        assert dist.recv(got) == 3
        assert got.item() == 9


def test_groups_of_the_same_ranks_are_told_apart_by_their_order(tmp_path: Path) -> None:
    for number, others in ((0, ()), (1, (0,))):
        with rank(number, tmp_path, *others):
            first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
            values = [torch.tensor([number + 10.0]), torch.tensor([number + 20.0])]
            # Not the order in which they were made.
            for group, value in ((second, values[1]), (first, values[0])):
                dist.broadcast(value, 0, group=group)
            assert [value.item() for value in values] == [10.0, 20.0]


def test_objects_arrive_in_every_way_and_the_tape_holds_builtins_only(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        dist.broadcast_object_list([{"seed": 3}, Job(world_size=4, rank=0, target="x")], 0)
        dist.scatter_object_list([None], [f"for {each}" for each in range(4)], src=0)
        dist.send_object_list(["a", "b"], 2)
        dist.gather_object("from 0", None, dst=2)
        dist.all_gather_object([None] * 4, "0's")
    with rank(2, tmp_path, 0):
        objects: list[Any] = ["mine gives way", None]
        dist.broadcast_object_list(objects, 0)
        assert objects == [{"seed": 3}, Job(world_size=4, rank=0, target="x")]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None, src=0)
        assert mine == ["for 2"]
        assert dist.recv_object_list(objects) == 0
        assert objects == ["a", "b"]
        slots: list[Any] = [None] * 4
        dist.gather_object("from 2", slots, dst=2)
        assert slots == ["from 0", "from 2", "from 2", "from 2"]
        dist.all_gather_object(slots, "2's")
        assert slots == ["0's", "2's", "2's", "2's"]
    kinds = [record.kind for record in read_journal(tmp_path / "0" / TAPE_NAME, TAPE_RECORDS)]
    assert kinds == ["group", *["sent"] * (len(kinds) - 1)]


class Shout:
    """Unpickling it is heard."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["SHOUT"],)


def test_objects_are_unpickled_by_the_rank_that_receives_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"
    monkeypatch.setenv("SHOUT", str(heard))
    with rank(0, tmp_path):
        dist.broadcast_object_list([Shout()], 0)
    assert list(Tape(tmp_path / "0", 0).sent_to(1))
    with rank(1, tmp_path, 0):
        assert not heard.exists()
        dist.broadcast_object_list([None], 0)
    assert heard.exists()


def test_a_tape_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    write_plain(tmp_path / TAPE_NAME, {"kind": "tape", "bad": pickle.loads(b"cos\ngetcwd\n.")})
    with pytest.raises(RunDirectoryError, match="wants to load"):
        list(Tape(tmp_path, 0).sent_to(1))


@pytest.mark.parametrize("wanted", [torch.zeros(5), torch.zeros(4, dtype=torch.int32)])
def test_other_sizes_and_types_are_complained_of(tmp_path: Path, wanted: torch.Tensor) -> None:
    expects = rf"expects {str(wanted.dtype)[6:]} \[{len(wanted)}\], the tape .* has float32 \[4\]"
    with rank(0, tmp_path):
        broadcast(torch.zeros(4))
        dist.send(torch.zeros(4), 1)
    with rank(1, tmp_path, 0):
        with pytest.raises(WorldError, match=r"broadcast from rank 0 in the group of ranks 0, 1, 2, 3: .*" + expects):
            broadcast(wanted)
        with pytest.raises(WorldError, match=r"send from rank 0.*" + expects) as caught:
            receive(wanted)
        assert "--rank 0,1" in caught.value.hint


def test_another_order_of_calls_or_number_of_objects_is_complained_of(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        dist.barrier()
        broadcast(torch.zeros(1))
    with rank(1, tmp_path, 0), pytest.raises(WorldError, match=r"as call 1 of the group, .* has it as call 2"):
        broadcast(torch.zeros(1))
    with rank(0, tmp_path):
        dist.broadcast_object_list([1, 2], 0)
    with rank(1, tmp_path, 0), pytest.raises(WorldError, match=r"expects 1 objects, the tape .* has 2"):
        dist.broadcast_object_list([None], 0)


def test_large_tensors_are_known_by_size_alone(tmp_path: Path) -> None:
    large = MAX_TENSOR_BYTES // 4 + 1
    with rank(0, tmp_path):
        broadcast(torch.ones(large))
        dist.send(torch.ones(large - 1), 1)
        broadcast(torch.ones(large))
    assert (tmp_path / "0" / TAPE_NAME).stat().st_size < MAX_TENSOR_BYTES + 4096
    with rank(1, tmp_path, 0) as tapes:
        assert broadcast(torch.full((large,), 2.0)).sum() == 2.0 * large
        assert receive(torch.zeros(large - 1)).sum() == large - 1
        with pytest.raises(WorldError, match="expects float32"):
            broadcast(torch.zeros(large + 1))
        assert any("1 call has made-up values" in note.text for note in tapes.notes())


def test_after_the_end_of_a_tape_values_are_made_up_and_counted(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        broadcast(torch.ones(2))
    with rank(1, tmp_path, 0) as tapes:
        assert tapes.notes() == []  # nothing was asked of it
        assert broadcast(torch.zeros(2)).tolist() == [1, 1]
        assert broadcast(torch.zeros(2)).tolist() == [0, 0]
        with pytest.raises(WorldError, match=r"waits for an object from rank 0, but its tape .* has no more") as caught:
            dist.broadcast_object_list([None], 0)
        assert "--steps" in caught.value.hint
        notes = tapes.notes()
    assert any("1 call was answered from the tape of rank 0" in note.text for note in notes)
    assert any("2 calls are not on the tape" in note.text for note in notes)


def test_a_tape_says_what_its_rank_waited_for_and_another_whether_it_has_that(tmp_path: Path) -> None:
    mine, theirs = Tape(tmp_path / "1", 1), Tape(tmp_path / "0", 0)
    with rank(0, tmp_path):
        dist.send_object_list(["first"], 1)
        dist.send_object_list(["not for rank 1"], 2)
    with rank(1, tmp_path, 0):
        found = [None]
        dist.recv_object_list(found, 0)
        assert found == ["first"]
        assert mine.awaited() is None
        with pytest.raises(WorldError, match="recv_object_list waits for an object from rank 0"):
            dist.recv_object_list([None], 0)
    awaited = mine.awaited()
    assert awaited is not None
    assert (awaited.source, awaited.nth) == (0, 2)
    assert not theirs.has(awaited, 1)
    with rank(0, tmp_path):
        dist.send_object_list(["first"], 1)
        dist.send_object_list(["second"], 1)
    assert theirs.has(awaited, 1)


def test_a_killed_runs_tape_is_good_until_then(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        for number in range(3):
            broadcast(torch.tensor([number]))
    path = tmp_path / "0" / TAPE_NAME
    path.write_bytes(path.read_bytes()[:-5])
    with rank(1, tmp_path, 0):
        assert [broadcast(torch.tensor([7])).item() for _ in range(3)] == [0, 1, 7]


# ---- which tapes a job takes


def run(directory: Path, job: Job) -> str:
    """A run directory with an empty tape."""
    directory.mkdir(parents=True)
    new_manifest(directory, job)
    writer = JournalWriter(directory / TAPE_NAME)
    writer.append(script_identity(job, os.getcwd()))
    writer.close()
    return str(directory)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('training')\n")
    return str(path)


def test_a_directory_of_runs_is_all_of_them_but_this_ranks_own(tmp_path: Path, script: str) -> None:
    jobs = [Job(world_size=8, rank=number, target=script) for number in (4, 0, 2)]
    for job in jobs:
        run(tmp_path / "runs" / f"rank{job.rank}", job)
    found = find_tapes(replace(jobs[0], tapes=(str(tmp_path / "runs"),)))
    assert [tape.rank for tape in found] == [0, 2]


def test_tapes_of_another_job_and_what_is_no_tape_are_refused_with_both_named(tmp_path: Path, script: str) -> None:
    (tmp_path / "evaluate.py").write_text("print('evaluating')\n")
    job = Job(world_size=8, rank=3, target=script)
    runs = {name: run(tmp_path / name, job) for name in ("a", "b", "old")}
    runs["large"] = run(tmp_path / "large", replace(job, world_size=16))
    (tmp_path / "old" / TAPE_NAME).unlink()
    evaluate, module = (
        replace(job, target=str(tmp_path / "evaluate.py")),
        replace(job, target="train.py", is_module=True),
    )
    for asking, given, message in (
        (job, [runs["large"]], r"large is from a world of 16 ranks, and this job has 8"),
        (evaluate, [runs["a"]], r"from the script .*train\.py, and this job runs .*evaluate\.py"),
        (module, [runs["a"]], r"from the script .*train\.py, and this job runs train\.py"),
        (job, [runs["a"], runs["b"]], "two tapes are from rank 3"),
        (job, [runs["old"]], "old has no tape"),
        (job, [str(tmp_path / "nowhere")], "nowhere does not exist"),
    ):
        with pytest.raises(RunDirectoryError, match=message):
            find_tapes(replace(asking, rank=0, tapes=tuple(given)))


def test_a_copy_of_the_script_and_an_edited_one_are_the_same_script(tmp_path: Path, script: str) -> None:
    other = run(tmp_path / "run", Job(world_size=8, rank=3, target=script))
    copy = tmp_path / "copy.py"
    copy.write_text(Path(script).read_text())
    Path(script).write_text("print('edited')\n")
    for target in (str(copy), script):
        assert find_tapes(Job(world_size=8, rank=0, target=target, tapes=(other,)))


CALL = Where("broadcast", ((0, 1), 0), source=0, sequence=1)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """The run of a rank that has written nothing of interest yet."""
    with create_run_directory(tmp_path / "rank0", False) as directory:
        new_manifest(directory, Job(world_size=4, rank=0, target="train.py"))
        yield directory


@pytest.fixture
def meanwhile(running: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The rank's actions, one each time that its tape is waited for. At last it ends."""
    tape = JournalWriter(running / TAPE_NAME)
    tape.append(GroupRecord(0, (0, 1), 0))

    def end() -> None:
        write_manifest(running, dataclasses.replace(load_manifest(running), exit=Ending(Outcome.STOPPED, 0)))

    steps: list[Callable[[], None]] = [
        lambda: tape.append(StoredRecord("seed", b"7")),
        lambda: tape.append(SentRecord(0, -1, "broadcast", 1, 0, tensors=[], objects=[b"plan"])),
        lambda: tape.append(StoredRecord("seed", b"8")),
        end,
    ]
    monkeypatch.setattr(time, "sleep", lambda seconds: steps.pop(0)())
    return steps


def test_a_call_of_a_rank_that_still_runs_is_waited_for(running: Path, meanwhile: list[Callable[[], None]]) -> None:
    reader = Reader(Tape(running, 0), 1)
    assert len(meanwhile) == 4
    sent = reader.take(CALL)
    assert sent is not None
    assert sent.objects == (b"plan",)
    assert len(meanwhile) == 2
    assert reader.take(CALL) is None  # the rank has ended without a second one
    assert meanwhile == []
    assert reader.num_over == 1


def test_values_in_stores_are_those_of_the_whole_tape(running: Path, meanwhile: list[Callable[[], None]]) -> None:
    reader = Reader(Tape(running, 0), 1)
    assert reader.stored("seed", 1) == b"7"
    assert len(meanwhile) == 3
    assert reader.stored("seed", 3) == b"8"  # the last of two, which is known at the end alone
    assert meanwhile == []
    assert reader.stored("other", 1) is None


def test_whether_a_rank_sends_is_known_when_it_does_or_has_ended(
    running: Path, meanwhile: list[Callable[[], None]]
) -> None:
    reader = Reader(Tape(running, 0), 1)
    assert reader.has(CALL)
    assert len(meanwhile) == 2
    assert not reader.has(CALL._replace(operation="scatter"))
    assert meanwhile == []


def test_threads_of_the_script_may_write_at_the_same_time() -> None:
    written: list[Record] = []

    def append(record: Record) -> None:
        time.sleep(0.001)  # another thread runs
        written.append(record)

    writer = Writer(append, None)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: writer.moved(MovedFile(str(number), "", "")), range(40)))
    assert sorted(int(record.path) for record in written if isinstance(record, MovedFile)) == list(range(40))
