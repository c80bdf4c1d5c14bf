"""The host's memory from hand-made records: what counts, where its peak is, and what a node of such ranks needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.analysis.blocks import host_memory, host_tables, node_memory
from fakedist.analysis.recording import Recording
from fakedist.options import Job
from fakedist.rundir.host_memory import HostPhase
from fakedist.rundir.memory_records import HostBlocksRecord, HostLookRecord, HostPlacesRecord, SaveRecord
from fakedist.rundir.rows import FrameRow, MappingRow, ScopeRow
from fakedist.rundir.schema import HOST_CHANGES
from tests.unit.analysis.recorded import MIB, HandMade, _columns

JOB = Job(world_size=16, rank=0, target="train.py")
PLACES = [(0, "init"), (1, "forward"), (1, "other"), (1, "save")]
INIT, FORWARD, OTHER, SAVE = range(4)
LINES = ["train.py:7 (main)", "train.py:9 (main)"]
PAGEABLE, PINNED, REGISTERED, MOVED = (HOST_CHANGES.index(name) for name in HOST_CHANGES)
Event = tuple[int, int, int, int]  # change, address, MiB, stack


def looked(at: int, place: int, *mappings: MappingRow, malloc: int = -1, pinned: int = -1) -> HostLookRecord:
    return HostLookRecord(at, place, malloc, pinned, pinned, 3 * MIB, list(mappings))


def recorded(folder: Path, events: list[Event], *looks: HostLookRecord) -> Recording:
    """The time of an event is its number times 10."""
    rows = [(change, address, size * MIB, 10 * at, stack) for at, (change, address, size, stack) in enumerate(events)]
    made = HandMade(directory=folder)
    frames = [FrameRow("train.py", 7, "main"), FrameRow("train.py", 9, "main")]
    made.others.append(HostPlacesRecord([ScopeRow(n, *place, 0, recompute=False) for n, place in enumerate(PLACES)]))
    made.others.append(HostBlocksRecord(frames, [(0,), (1,)], **_columns_without_lists(rows)))
    made.others += looks
    made.others.append(SaveRecord("torch.save", LINES[0], SAVE, 5, 9, 12 * MIB, asynchronous=False))
    return made.read()


def _columns_without_lists(rows: list[tuple[int, ...]]) -> dict[str, bytes]:
    return _columns(HostBlocksRecord, rows)


def test_the_peak_is_where_most_is_held_and_a_block_that_was_freed_is_no_part_of_it(tmp_path: Path) -> None:
    events = [
        (MOVED, INIT, 0, -1), (PAGEABLE, 1000, 64, 0), (PAGEABLE, 1000, 0, -1), (PINNED, 2000, 8, 0),
        (MOVED, FORWARD, 0, -1), (PAGEABLE, 3000, 16, 1), (MOVED, SAVE, 0, -1), (PAGEABLE, 4000, 48, 1),
        (PAGEABLE, 4000, 0, -1), (MOVED, OTHER, 0, -1),
    ]  # fmt: skip
    recording = recorded(tmp_path, events, looked(200, OTHER, malloc=26 * MIB))
    memory = host_memory(recording, JOB, LINES)
    assert memory is not None
    assert memory.peak == replace(
        HostPhase(1, "save"), peak_bytes=72 * MIB, pageable_bytes=64 * MIB, pinned_bytes=8 * MIB
    )
    assert {(phase.step, phase.phase): phase.peak_bytes // MIB for phase in memory.phases} == {
        (0, "init"): 64, (1, "forward"): 24, (1, "save"): 72, (1, "other"): 24,
    }  # fmt: skip
    assert [(row.line, row.kind, row.bytes // MIB, row.num_blocks) for row in memory.lines] == [
        (LINES[1], "pageable", 64, 2), (LINES[0], "pinned", 8, 1),
    ]  # fmt: skip
    other = next(phase for phase in memory.phases if phase.phase == "other")
    assert (other.other_bytes, other.prefetched_bytes) == (10 * MIB, 3 * MIB)  # 16 MiB of malloc's are a tensor
    tables = host_tables(recording, JOB)
    assert tables["host_blocks"]["at_peak"].tolist() == [False, True, True, True]
    assert tables["host_blocks"]["free_us"].tolist() == [20, -1, -1, 80]
    assert [(save.function, save.step, save.written_bytes) for save in memory.saves] == [("torch.save", 1, 12 * MIB)]


def test_what_is_registered_counts_once_and_shared_memory_when_it_is_looked_at(tmp_path: Path) -> None:
    segment = MappingRow(50_000, 32 * MIB, "/dev/shm/torch_1 (deleted)", is_private=False)
    named = replace_path(segment, "/dev/shm/store", 90_000_000)
    data = MappingRow(500_000_000, 128 * MIB, "/data/tokens.bin", is_private=False)
    events = [
        (MOVED, FORWARD, 0, -1), (PAGEABLE, 1000, 16, 0), (REGISTERED, 1000, 16, 0), (REGISTERED, 50_000, 32, 0),
        (REGISTERED, 1 << 40, 4, 0),
    ]  # fmt: skip
    memory = host_memory(recorded(tmp_path, events, looked(100, FORWARD, segment, named, data)), JOB, LINES)
    assert memory is not None
    peak = memory.peak
    assert [peak.pageable_bytes // MIB, peak.pinned_bytes // MIB, peak.shared_bytes // MIB] == [16, 4, 64]
    assert (peak.named_bytes // MIB, peak.mapped_bytes // MIB, peak.private_bytes) == (32, 128, 0)
    assert memory.node.high_bytes == 8 * 84 * MIB
    assert memory.node.low_bytes == (84 + 7 * (84 - 32)) * MIB  # all ranks may map the segment that has a name


def replace_path(row: MappingRow, path: str, address: int) -> MappingRow:
    return row._replace(path=path, address=address)


def test_on_a_real_gpu_pinned_memory_is_what_torch_says(tmp_path: Path) -> None:
    events = [(MOVED, FORWARD, 0, -1), (PAGEABLE, 1000, 16, 0)]
    recording = recorded(tmp_path, events, looked(100, FORWARD, pinned=40 * MIB))
    on_cuda = host_memory(recording, replace(JOB, device="cuda"), LINES)
    virtual = host_memory(recording, JOB, LINES)
    assert on_cuda is not None
    assert virtual is not None
    assert (on_cuda.peak.pinned_bytes, virtual.peak.pinned_bytes) == (40 * MIB, 0)
    assert any("torch's statistics" in text for text in on_cuda.unknown)


def test_without_a_look_nothing_was_recorded(tmp_path: Path) -> None:
    assert host_memory(recorded(tmp_path, []), JOB, LINES) is None


def phases(forward: int, save: int) -> list[HostPhase]:
    return [HostPhase(1, "forward", peak_bytes=forward), HostPhase(1, "save", peak_bytes=save)]


@pytest.mark.parametrize(
    ("ranks", "high", "low", "low_phase"),
    [
        ({0: phases(10, 90)}, 8 * 90, 90 + 7 * 10, "save"),
        ({0: phases(30, 20)}, 8 * 30, 8 * 30, "forward"),
        ({0: phases(10, 90), 1: phases(10, 20)}, 90 + 7 * 20, 90 + 20 + 6 * 10, "save"),
        ({0: phases(10, 90), 1: phases(40, 0)[:1]}, 90 + 7 * 40, 90 + 7 * 40, "save"),  # rank 1 does not save
    ],
)
def test_ranks_that_did_not_run_are_copies_of_the_last_that_did(
    ranks: dict[int, list[HostPhase]], high: int, low: int, low_phase: str
) -> None:
    node = node_memory(ranks, replace(JOB, host_memory_bytes=1 << 30))
    assert (node.high_bytes, node.low_bytes, node.low_phase) == (high, low, low_phase)
    assert (node.num_ranks, node.recorded, node.limit_bytes) == (8, sorted(ranks), 1 << 30)
