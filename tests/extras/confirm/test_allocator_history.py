from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fakedist.extras.confirm import allocator_history
from fakedist.extras.confirm.allocator_history import (
    EventsBuilder,
    RecordingFileError,
    compare,
    compare_job,
    load,
    summary,
)
from tests.extras.confirm.made_up import EVENTS, Event, job, recording


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    failed = job("failed", ())
    failed.error, failed.notes = "RuntimeError: no", ["refused: cuFoo, 2 calls"]
    saved = recording(job(), failed)
    (tmp_path / "a.jsonl.gz").write_bytes(saved.packed())
    assert load(tmp_path / "a.jsonl.gz") == load("another name", saved.packed()) == saved


def test_the_same_recording_gives_the_same_bytes() -> None:
    first = recording(job()).packed()
    assert first == recording(job()).packed()
    assert first[4:8] == b"\0\0\0\0"  # gzip's time
    assert first[3] == 0  # and no file name


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", *(gzip.compress(line) for line in (b'{"format":2}\n', b"[]\n", b'{"format":1}\n'))],
    ids=["empty", "text", "format", "list", "headless"],
)
def test_what_is_no_recording_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(RecordingFileError, match=str(tmp_path / "file")) as raised:
        load(tmp_path / "file")
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_history, "_MOST_BYTES", 100)
    with pytest.raises(RecordingFileError, match="more than 100 bytes"):
        load("file", recording(job()).packed())


def test_a_recording_whose_columns_do_not_fit_is_refused() -> None:
    torn = job()
    torn.events.sizes.pop()
    with pytest.raises(RecordingFileError, match="not equally long"):
        load("file", recording(torn).packed())


def test_streams_are_numbered_by_their_first_event_and_snapshots_are_left_out() -> None:
    builder = EventsBuilder()
    for action, stream in (("alloc", 96), ("snapshot", 5), ("alloc", 64), ("annotate", 1), ("free_requested", 96)):
        builder.add(action, 512, stream)
    events = builder.build()
    assert (events.actions, events.streams) == ("aar", [0, 1, 0])
    assert len(job().events) == len(EVENTS)


MIB = 1 << 20


def test_equal_jobs_are_the_same_whatever_their_places_and_streams_are_called() -> None:
    found = compare_job("train", job(), job())
    assert (found.verdict, found.reason, found.lines) == ("same", "", [])
    other = job(events=tuple((action, size, stream + 7) for action, size, stream in EVENTS))
    other.events.names = [name + " elsewhere" for name in other.events.names]
    assert compare_job("train", job(), other).is_same


def test_an_event_more_is_found_with_its_place_and_its_neighbours() -> None:
    more = (*EVENTS[:5], ("alloc", 3 * MIB, 64), *EVENTS[5:])
    found = compare_job("train", job(), job(events=more))
    # Blocks of 2 MiB on both streams, then of 3: the one more is first seen where the streams get out of step.
    assert found.verdict == "events"
    assert found.reason == f"event 6: real alloc {3 * MIB} stream 1, virtual alloc {3 * MIB} stream 0"
    assert found.lines[:2] == ["real: 23 events", "virtual: 24 events"]
    one_side = [line.split() for line in found.lines[2:] if line.split()[0] in ("real", "virtual")]
    assert one_side == [["virtual", "5", "alloc", str(3 * MIB), "stream", "0", "line", "5"]]
    assert found.lines[2].split() == ["2", "alloc", str(MIB), "stream", "1", "line", "2"]  # what is before on both
    assert found.text()[1:] == [f"train: events: {found.reason}", *found.lines]


@pytest.mark.parametrize(
    ("events", "reason", "line"),
    [
        (
            EVENTS[:-1],
            f"event 22: real free_completed {MIB} stream 0, virtual ended",
            "real 22 free_completed",
        ),
        (
            (*EVENTS[:4], ("alloc", 512, 64), *EVENTS[5:]),
            f"event 4: real alloc {2 * MIB} stream 1, virtual alloc 512 stream 0",
            "virtual 4 alloc 512",
        ),
        (
            (*EVENTS[:3], ("alloc", 2 * MIB, 96), *EVENTS[4:]),
            f"event 3: real alloc {2 * MIB} stream 0, virtual alloc {2 * MIB} stream 1",
            "stream 1",
        ),
        (
            (*EVENTS[:3], EVENTS[5], EVENTS[4], EVENTS[3], *EVENTS[6:]),
            "event 3: ",
            "virtual 3 alloc",
        ),
        (
            (*EVENTS[:3], *(("alloc", 7, 64) for _ in range(300))),
            "event 3: ",
            "virtual 202 alloc 7",
        ),
    ],
    ids=["one less", "size", "stream", "order", "never again"],
)
def test_another_event_is_found(events: tuple[Event, ...], reason: str, line: str) -> None:
    found = compare_job("train", job(), job(events=events))
    assert found.verdict == "events"
    assert found.reason.startswith(reason)
    assert line in "\n".join(" ".join(each.split()) for each in found.lines[2:])


#: Two blocks more, freed one after the other; then the first of them is needed again.
FREED = (
    *EVENTS,
    *(("alloc", size, 64) for size in (512, 1024)),
    *((action, size, 64) for size in (512, 1024) for action in ("free_requested", "free_completed")),
    ("alloc", 512, 64),
)


def test_frees_in_another_order_with_nothing_between_them_are_told_and_count_as_the_same() -> None:
    other = (*FREED[:-5], *FREED[-3:-1], *FREED[-5:-3], FREED[-1])
    found = compare_job("train", job(events=FREED), job(events=other, inactive_split__all__peak=7))
    assert found.verdict == "statistics"  # one side has no such statistic at all
    before = job(events=FREED, inactive_split__all__peak=6)
    found = compare_job("train", before, job(events=other, inactive_split__all__peak=7))
    assert (found.verdict, found.is_same) == ("order", True)
    assert found.reason == "frees with nothing between them come in another order, from event 25 on"


def test_segments_given_back_in_another_order_or_blocks_that_change_places_are_an_order_too() -> None:
    given_back = [("segment_free", 20 << 20, 64), ("segment_free", 2 << 20, 96)]
    one, other = (job(events=(*EVENTS, *segments, EVENTS[1])) for segments in (given_back, given_back[::-1]))
    assert compare_job("train", one, other).verdict == "order"
    block_first = job(events=(*EVENTS[:-2], *given_back, *EVENTS[-2:], EVENTS[1]))
    assert compare_job("train", one, block_first).verdict == "events"
    one, other = (job(inactive_split__all__freed=number) for number in (6, 7))
    assert compare_job("train", one, other).verdict == "order"


def test_an_allocation_between_frees_is_no_matter_of_order() -> None:
    other = (*FREED[:-3], FREED[-1], *FREED[-3:-1])
    found = compare_job("train", job(events=FREED), job(events=other))
    assert found.verdict == "events"
    assert found.reason == "event 27: real free_requested 1024 stream 0, virtual alloc 512 stream 0"


def test_other_statistics_are_found_though_every_event_is_the_same() -> None:
    found = compare_job("train", job(num_ooms=0), job(num_ooms=2, allocated_bytes__all__peak=1))
    assert found.verdict == "statistics"
    assert found.reason.startswith(f"allocated_bytes.all.peak: real {110 * MIB}, virtual 1, though every event")
    assert found.lines[-1].split() == ["num_ooms", "0", "2", "+2"]


def test_what_one_side_lacks_is_a_difference() -> None:
    found = compare_job("train", job(num_ooms=0), job())
    assert found.verdict == "statistics"
    assert found.lines[-1].split() == ["num_ooms", "0", "-", "-"]
    jobs = compare(recording(job(), job("other")), recording(job(), device="virtual"))
    assert [(each.job, each.verdict) for each in jobs] == [("train", "same"), ("other", "missing")]
    assert jobs[1].reason == "other was not recorded on the side called virtual"


def test_an_error_of_one_side_is_a_difference_and_one_of_both_is_no_agreement() -> None:
    failed = job()
    failed.error = "RuntimeError: no such kernel"
    assert compare_job("train", job(), failed).verdict == "error"
    found = compare_job("train", failed, failed)
    assert (found.verdict, found.is_same) == ("failed", False)
    assert found.reason.count("no such kernel") == 2


def test_the_table_shows_peaks_or_by_how_much_they_differ() -> None:
    other = recording(job(reserved_bytes__all__peak=122 * MIB), device="virtual")
    *_, row, last = summary(compare(recording(job()), other))
    assert row.split()[:4] == ["train", "statistics", str(110 * MIB), f"+{2 * MIB}"]
    assert last == "0 of 1 jobs are the same, byte for byte"
    assert compare(recording(job()), recording(device="virtual"))[0].verdict == "missing"
