"""What stood in for what another rank would have sent is counted and told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fakedist.options import Job
from fakedist.world.reroute import fake_world
from fakedist.world.tapes import Tapes
from tests.unit.world.test_tapes import rank


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


def test_what_stays_as_it_was_is_not_made_up() -> None:
    tapes = Tapes(rank=1)
    with fake_world(Job(world_size=4, rank=1, target="x", collectives="noop"), tapes=tapes):
        dist.init_process_group("gloo")
        dist.recv(received := torch.full((2,), 7.0), 0)
        dist.scatter(received, None, src=0)
    assert received.tolist() == [7.0, 7.0]
    assert tapes.notes() == []


def test_what_a_tape_answers_is_not_counted_as_made_up(tmp_path: Path) -> None:
    with rank(0, tmp_path):
        dist.send(torch.ones(2), 1)
        dist.broadcast_object_list(["theirs"], 0)
    with rank(1, tmp_path, 0) as tapes:
        dist.recv(torch.zeros(2), 0)
        dist.broadcast_object_list(["mine"], 0)
        assert not any("made_up" in note.code for note in tapes.notes())


def test_integers_on_the_host_that_no_tape_has_are_named_with_their_line(tapes: Tapes) -> None:
    dist.broadcast(torch.tensor([3]), 0)
    dist.broadcast(torch.ones(2), 0)
    dist.broadcast(torch.zeros(65, dtype=torch.int64), 0)  # data, not flags
    (record,) = tapes.not_sent()
    assert (record.call, record.source, record.is_read) == ("broadcast", 0, False)
    assert record.line.startswith(f"{__file__}:")
    assert record.command == "--rank 0,1"


def test_shapes_that_ddp_compares_are_this_ranks_own(tapes: Tapes) -> None:
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert tapes.not_sent() == []
