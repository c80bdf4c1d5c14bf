"""Stand-ins for another rank's objects and numbers are counted, and on the tape, so that a failure can name them."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from fakedist.errors import WorldError
from fakedist.options import Job
from fakedist.rundir.tape import Guess, Tape
from fakedist.world.reroute import fake_world
from fakedist.world.tapes import Tapes
from tests.unit.world.test_tapes import rank


def guesses(directory: Path, script: Callable[[], object]) -> list[Guess]:
    """Guesses of rank 3 of four when it runs a script without tapes."""
    with rank(3, directory):
        script()
    return Tape(directory / "3", 3).guesses()


@pytest.mark.parametrize(
    ("placeholder", "held"),
    [
        ("", "this rank's own ''"),
        ("/ckpt/step10", "this rank's own '/ckpt/step10'"),
        (0, "this rank's own 0"),
        ({}, "this rank's own empty dict"),
        ([], "this rank's own empty list"),
        ({"step": 1}, "this rank's own dict"),
        (object, "this rank's own type"),
    ],
)
def test_a_placeholder_stays_and_is_a_guess_with_its_line(tmp_path: Path, placeholder: Any, held: str) -> None:
    objects = [placeholder]
    (guess,) = guesses(tmp_path, lambda: dist.broadcast_object_list(objects, src=1))
    assert objects == [placeholder]
    assert (guess.called, guess.held, guess.is_object, guess.awaited.source) == ("broadcast_object_list", held, True, 1)
    assert guess.line.startswith(f"{__file__}:")


def test_a_line_is_one_guess_however_often_it_runs(tmp_path: Path) -> None:
    def script() -> None:
        for _ in range(5):
            dist.broadcast_object_list([""], src=0)
        dist.recv_object_list([""], src=0)

    assert [guess.called for guess in guesses(tmp_path, script)] == ["broadcast_object_list", "recv_object_list"]


@pytest.mark.parametrize("flag", [True, False, numpy.bool_(True)])
def test_a_flag_decides_and_is_refused(tmp_path: Path, flag: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: dist.broadcast_object_list([flag], src=0),
        lambda: dist.broadcast_object_list(["config", flag], src=0),
        lambda: dist.scatter_object_list([flag], None, src=0),
        lambda: dist.recv_object_list([flag], src=0),
    ]
    for call in calls:
        with rank(3, tmp_path), pytest.raises(WorldError, match=r"waits for a bool from rank 0, which") as caught:
            call()
        assert "--rank 0,3" in caught.value.hint
        tape = Tape(tmp_path / "3", 3)
        assert tape.guesses() == []
        assert tape.awaited() is not None
    with rank(0, tmp_path):
        dist.scatter_object_list([None], [not flag] * 4, src=0)
    with rank(3, tmp_path, 0):
        dist.scatter_object_list(got := [flag], None, src=0)
    assert got == [not flag]
    with rank(3, tmp_path), pytest.raises(WorldError, match="scatter_object_list waits for an object from rank 0"):
        dist.scatter_object_list([None], [None] * 4, src=0)  # the placeholders of torch's own example


def test_what_runs_all_that_a_rank_waits_for_is_offered_unless_that_is_what_runs(tmp_path: Path) -> None:
    for peers, told in (("--rank 3 --with-peers", True), ("", False)):
        tapes = Tapes(rank=3, command=lambda ranks, peers=peers: "--rank 0,3" if len(ranks) > 1 else peers)
        with fake_world(Job(world_size=4, rank=3, target="x"), tapes=tapes):
            dist.init_process_group("gloo")
            with pytest.raises(WorldError) as caught:
                dist.broadcast_object_list([None], src=0)
        lines = caught.value.hint.splitlines()
        assert lines[0].endswith("--rank 0,3")
        assert [line for line in lines if line.endswith(": --rank 3 --with-peers")] == lines[1:]
        assert (len(lines) == 2) == told


def test_sizes_and_pickled_bytes_that_no_tape_has_are_guesses_after_objects(tmp_path: Path) -> None:
    def script() -> None:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0)
        dist.broadcast(torch.ones(3), 0)  # floats decide nothing
        pickled = torch.zeros(8, dtype=torch.uint8)
        dist.recv(pickled, 0)
        dist.broadcast_object_list([""], src=0)

    found = guesses(tmp_path, script)
    assert [(guess.called, guess.is_object, guess.held) for guess in found] == [
        ("broadcast_object_list", True, "this rank's own ''"),
        ("broadcast", False, "this rank's own values in a tensor int64 [1]"),
        ("recv", False, "zeros in a tensor uint8 [8]"),
    ]


def test_a_tape_has_what_was_guessed_and_then_nothing_is(tmp_path: Path) -> None:
    def send() -> None:
        pickled = pickle.dumps({"vocabulary": 50_257})
        dist.broadcast(torch.tensor([len(pickled)]), 0)
        dist.broadcast(torch.frombuffer(bytearray(pickled), dtype=torch.uint8), 0)
        dist.broadcast_object_list(["theirs"], src=0)

    def receive() -> list[Any]:
        size, objects = torch.zeros(1, dtype=torch.int64), [""]
        dist.broadcast(size, 0)
        pickled = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(pickled, 0)
        dist.broadcast_object_list(objects, src=0)
        return [pickle.loads(bytes(pickled.tolist())) if len(pickled) else None, *objects]

    asked = guesses(tmp_path, receive)
    with rank(0, tmp_path):
        send()
    tape = Tape(tmp_path / "0", 0)
    assert [tape.has(guess.awaited, 3) for guess in asked] == [True, True]
    with rank(3, tmp_path, 0) as tapes:
        assert receive() == [{"vocabulary": 50_257}, "theirs"]
        assert not any("made_up" in note.code for note in tapes.notes())
    assert Tape(tmp_path / "3", 3).guesses() == []


def test_a_key_of_a_store_that_another_rank_sets_comes_from_its_tape(tmp_path: Path) -> None:
    def store() -> Any:
        return dist.TCPStore("localhost", 29_500, 4, dist.get_rank() == 0)

    with rank(3, tmp_path), pytest.raises(WorldError, match="the store's key 'localhost:29500/address'") as caught:
        store().get("address")
    assert "--rank 0,3" in caught.value.hint
    awaited = Tape(tmp_path / "3", 3).awaited()
    with rank(0, tmp_path):
        one, other = store(), dist.TCPStore("localhost", 1, 4, True)
        for value in ("first", "second"):
            one.set("address", value)
        other.set("other", "x")
    assert awaited is not None
    assert Tape(tmp_path / "0", 0).has(awaited, 3)
    with rank(3, tmp_path, 0):
        one = store()
        one.wait(["address"])
        assert one.check(["address"])
        assert not one.check(["other"])
        assert [one.get("address") for _ in range(3)] == [b"first", b"second", b"second"]


@pytest.fixture
def tapes() -> Iterator[Tapes]:
    """Being rank 1 of four, without a tape of another rank."""
    found = Tapes(rank=1)
    with fake_world(Job(world_size=4, rank=1, target="x"), tapes=found):
        dist.init_process_group("gloo")
        yield found


def test_what_stands_in_for_another_ranks_is_counted_with_its_first_line(tapes: Tapes) -> None:
    assert tapes.notes() == []
    dist.broadcast_object_list(["mine"], 0)
    dist.scatter_object_list([None], ["for each"] * 4, src=0)
    dist.scatter_object_list(["mine"], None, src=0)
    dist.recv_object_list(["mine"], 0)
    (note,) = tapes.notes()
    assert note.text.startswith("this rank's own objects stood in for 4 objects from other ranks, ")
    assert f"first in broadcast_object_list at {__file__}:" in note.text
    assert "--tape" in note.text


def test_tensors_that_no_tape_has_are_counted(tapes: Tapes) -> None:
    dist.recv(torch.zeros(2), 0)
    dist.recv(torch.zeros(2, dtype=torch.int64), 0)
    dist.scatter(torch.zeros(2, dtype=torch.bool), None, src=0)
    dist.broadcast(torch.ones(2), 0)  # what is in the buffer stays
    (note,) = tapes.notes()
    assert note.text.startswith("3 tensors from other ranks were made up (2 of integers or flags, as zeros), ")
    assert f"first in recv at {__file__}:" in note.text


def test_what_stays_as_it_was_is_not_made_up(tmp_path: Path) -> None:
    with rank(1, tmp_path, collectives="noop") as tapes:
        dist.recv(received := torch.full((2,), 7.0), 0)
        dist.scatter(received, None, src=0)
        assert received.tolist() == [7.0, 7.0]
        assert tapes.notes() == []


def test_integers_on_the_host_that_no_tape_has_are_named_with_their_line(tapes: Tapes) -> None:
    dist.broadcast(torch.tensor([3]), 0)
    dist.broadcast(torch.ones(2), 0)
    dist.broadcast(torch.zeros(65, dtype=torch.int64), 0)  # data, not flags
    (record,) = tapes.not_sent()
    assert (record.call, record.source, record.is_read) == ("broadcast", 0, False)
    assert record.line.startswith(f"{__file__}:")
    assert record.command == "--rank 0,1"


def test_shapes_that_ddp_compares_are_this_ranks_own(tmp_path: Path) -> None:
    with rank(3, tmp_path) as tapes:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert tapes.not_sent() == []
    assert Tape(tmp_path / "3", 3).guesses() == []
