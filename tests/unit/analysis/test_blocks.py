"""The host's memory from hand-made records: what counts, where its peak is, and what a node of such ranks needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fakedist.analysis.blocks import Blocks, build_blocks, host_memory, host_tables, node_memory
from fakedist.analysis.recording import Recording
from fakedist.options import Job
from fakedist.rundir.host_memory import HostPhase
from fakedist.rundir.memory_records import HostBlocksRecord, HostLookRecord, HostPlacesRecord, SaveRecord
from fakedist.rundir.rows import FrameRow, MappingRow, ScopeRow
from fakedist.rundir.schema import CATEGORIES, HOST_CHANGES
from tests.unit.analysis.recorded import BASE, MIB, HandMade, _columns


def categories(blocks: Blocks) -> list[str]:
    return blocks.frame["category"].astype(str).tolist()


def test_a_block_says_where_it_was_made(made: HandMade) -> None:
    layer = made.layer("head")
    line = made.stack(("/job/train.py", 7, "main"))
    made.op("backward", 2, layer, recompute=True, name="aten.add.Tensor")
    made.alloc(0, 1000, stream=5, stack=line)
    row = made.blocks().frame.iloc[0].to_dict()
    events = {"alloc_event": 1, "free_event": 2, "reuse_event": 2, "op": 0, "operation": "aten.add.Tensor"}
    place = {"step": 2, "phase": "backward", "recompute": True, "layer": layer, "stream": 5, "stack": 0}
    sizes = {"address": BASE, "requested_bytes": 1000, "bytes": 1024, "category": "temporary"}
    assert row == sizes | events | place


def test_a_block_outside_of_any_operation_has_no_place(made: HandMade) -> None:
    made.alloc(0, MIB, op=-1)
    made.op("forward", 1, made.layer("a"))
    made.alloc(MIB, MIB, op=5)  # its operation was not written down before the rank was killed
    frame = made.blocks().frame
    assert frame["category"].astype(str).tolist() == ["other", "other"]
    assert frame[["step", "layer"]].to_numpy().tolist() == [[0, 0], [0, 0]]
    assert frame["operation"].astype(str).tolist() == ["", ""]


def test_a_mark_is_about_the_block_that_was_at_the_address_then(made: HandMade) -> None:
    made.op()
    made.mark(MIB, "parameter")  # of no block
    made.alloc(0, MIB, mark=("gradient",))
    made.op()
    made.free(0, MIB)
    made.alloc(0, MIB)
    made.op()
    made.alloc(MIB, MIB)
    made.mark(0, "parameter")
    made.op()
    made.free(0, MIB)
    made.alloc(0, MIB)
    assert categories(made.blocks()) == ["gradient", "parameter", "temporary", "temporary"]


def test_marks_win_in_the_order_of_the_schema(made: HandMade) -> None:
    made.op()
    marks = ("communication", "workspace", "gradient", "optimizer_state", "parameter")
    for number in range(len(marks)):
        made.alloc(number * MIB, MIB)
        for name in marks[: number + 1]:
            made.mark(number * MIB, name)
    assert categories(made.blocks()) == list(marks)
    assert list(marks) == [name for name in reversed(CATEGORIES) if name in marks]


@pytest.mark.parametrize(
    ("mark", "category"),
    [("gradient", "gradient"), ("workspace", "workspace"), ("communication", "activation"), (None, "activation")],
)
def test_a_block_that_is_kept_for_backward_is_an_activation_unless_it_is_something_better(
    made: HandMade, mark: str | None, category: str
) -> None:
    first = made.op("forward")
    made.alloc(0, MIB)
    if mark:
        made.mark(0, mark)
    made.op("backward")
    made.free(0, MIB)
    made.region(first, first)
    assert categories(made.blocks()) == [category]


@pytest.mark.parametrize(
    ("freed", "phase", "step", "category"),
    [
        (True, "optimizer", 1, "activation"),
        (False, "optimizer", 1, "communication"),  # in the last step the optimizer tells a kept buffer
        (False, "forward", 2, "communication"),
    ],
)
def test_a_buffer_for_communication_that_outlives_its_step_is_no_activation(
    made: HandMade, freed: bool, phase: str, step: int, category: str
) -> None:
    first = made.op("forward")
    made.alloc(0, MIB, mark=("communication",))
    made.region(first, first)
    made.op("backward")
    if freed:
        made.free(0, MIB)
    made.op(phase, step)
    made.alloc(MIB, MIB)
    assert categories(made.blocks())[0] == category


def test_activations_are_what_is_left_of_a_forward_when_it_ends(made: HandMade) -> None:
    first = made.op("forward")
    made.alloc(0, MIB)  # kept
    made.alloc(MIB, MIB)  # let go by the forward's own last operation
    last = made.op("forward")
    made.free(MIB, MIB)
    made.region(first, last)
    made.op("backward")
    made.free(0, MIB)
    made.alloc(2 * MIB, MIB)  # after the region
    assert categories(made.blocks()) == ["activation", "temporary", "temporary"]


def test_what_a_checkpoint_computes_again_in_backward_is_an_activation_too(made: HandMade) -> None:
    forward = made.op("forward")
    made.region(forward, forward)
    made.op("backward")
    made.alloc(0, MIB)
    again = made.op("backward", recompute=True)
    made.alloc(MIB, MIB)
    made.region(again, again)
    made.op("backward")
    made.free(MIB, MIB)
    found = made.blocks()
    assert categories(found) == ["temporary", "activation"]
    assert found.frame["recompute"].tolist() == [False, True]


def test_what_is_made_before_the_first_step_is_other_unless_it_is_marked(made: HandMade) -> None:
    made.op("init", 0)
    made.alloc(0, MIB)
    made.alloc(MIB, MIB, mark=("parameter",))
    made.op("optimizer", 1)
    made.alloc(2 * MIB, MIB)
    assert categories(made.blocks()) == ["other", "parameter", "temporary"]


def test_a_marked_block_belongs_to_the_layer_that_owns_its_best_category(made: HandMade) -> None:
    first, second = made.layer("a"), made.layer("b")
    made.op("init", 0, first)
    made.alloc(0, MIB, mark=("gradient", first, MIB))
    made.mark(0, "parameter", second, MIB)
    made.alloc(MIB, MIB, mark=("parameter",))  # no owner is known
    found = made.blocks()
    assert found.frame["layer"].tolist() == [second, first]
    assert found.shares.empty


def test_a_shard_of_gathered_parameters_is_one_unless_it_was_made_for_the_gather(made: HandMade) -> None:
    layer = made.layer("a")
    made.op("init", 0)
    made.alloc(0, MIB)
    made.op("forward", 1)
    made.alloc(MIB, MIB)
    for address in (0, MIB):
        made.mark(address, "communication")
        made.mark(address, "shard", layer, MIB)
    found = made.blocks()
    assert categories(found) == ["parameter", "communication"]
    assert found.frame["layer"].tolist() == [layer, 0]


@pytest.mark.parametrize(
    ("size", "marks", "shares"),
    [
        # A weight, a bias that is seen twice, and a view of a part of both.
        (
            10 * MIB,
            [
                ("a", 3 * MIB, 0),
                ("a", MIB, 3 * MIB),
                ("a", MIB, 3 * MIB),
                ("a", MIB + 5, 2 * MIB),
                ("b", 6 * MIB, 4 * MIB),
            ],
            {"a": 4 * MIB, "b": 6 * MIB},
        ),
        # Seen twice: the larger counts.
        (
            10 * MIB,
            [("a", 100, 0), ("a", 3 * MIB + 1, 0), ("b", 5 * MIB, 0)],
            {"a": 3 * MIB + 1, "b": 5 * MIB, "maker": 2 * MIB - 1},
        ),
        (4 * MIB, [("maker", MIB, 0), ("b", MIB, 0)], {"maker": 3 * MIB, "b": MIB}),
    ],
)
def test_a_shared_block_is_divided_exactly_and_the_rest_is_its_makers(
    made: HandMade, size: int, marks: list[tuple[str, int, int]], shares: dict[str, int]
) -> None:
    layers = {name: made.layer(name) for name in ("a", "b", "maker")}
    made.op("init", 0, layers["maker"])
    made.alloc(0, size)
    for name, bytes_, start in marks:
        made.mark(0, "parameter", layers[name], bytes_, start)
    found = made.blocks().shares
    expected = [{"block": 0, "layer": layers[name], "bytes": bytes_} for name, bytes_ in shares.items()]
    assert found.to_dict("records") == sorted(expected, key=lambda row: row["layer"])


def test_what_is_left_of_a_bucket_for_everybody_is_outside_of_modules(made: HandMade) -> None:
    first, maker = made.layer("a"), made.layer("c")
    made.op("backward", 1, maker)
    made.alloc(0, 10 * MIB, mark=("gradient", 0))
    made.alloc(10 * MIB, MIB, mark=("gradient", 0))
    made.mark(0, "gradient", first, 4 * MIB)
    found = made.blocks()
    assert found.shares[["layer", "bytes"]].to_numpy().tolist() == [[0, 6 * MIB], [first, 4 * MIB]]
    assert found.frame["layer"].tolist()[1] == 0


def test_tied_weights_are_divided_in_proportion_and_add_up_to_the_block(made: HandMade) -> None:
    owners = [made.layer(name) for name in "abc"]
    made.op("init", 0)
    made.alloc(0, MIB + 512)
    for owner, bytes_ in zip(owners, (MIB + 512, MIB + 512, MIB // 3), strict=True):
        made.mark(0, "parameter", owner, bytes_)
    shares = made.blocks().shares
    assert shares["bytes"].sum() == MIB + 512
    assert set(shares["layer"]) == set(owners)  # the remainder goes to owners alone
    assert len(shares) == len(owners)
    by_layer = shares.set_index("layer")["bytes"]
    assert abs(by_layer[owners[0]] - by_layer[owners[1]]) <= 2
    assert by_layer[owners[2]] < by_layer[owners[1]] / 2


def test_the_peak_is_the_first_event_with_most_bytes(made: HandMade) -> None:
    made.op()
    made.alloc(0, MIB)
    made.alloc(MIB, MIB)
    made.free(MIB, MIB)
    made.alloc(2 * MIB, MIB)
    found = made.blocks()
    assert found.peak_event == 2
    assert found.at_peak.tolist() == [True, True, False]


def test_a_recording_without_events_has_no_blocks(tmp_path: Path) -> None:
    found = build_blocks(HandMade().read(tmp_path))
    assert len(found.frame) == len(found.shares) == 0
    assert found.peak_event == -1


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
