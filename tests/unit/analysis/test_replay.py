"""The size of each block, from hand-made histories whose answers are in c10/cuda/CUDACachingAllocator.cpp."""

from collections.abc import Sequence

import pytest

from fakedist.analysis.replay import AddressRanges, AllocatorSettings, Replay, parse_settings, replay, rounded_bytes
from fakedist.rundir.schema import ACTIONS
from tests.unit.analysis.best_fit import random_history

KIB, MIB = 1 << 10, 1 << 20
BASE = 0x7F0000000000
CODE = {name: code for code, name in enumerate(ACTIONS)}


def played(*events: tuple[str, int, int], conf: str = "", changes: Sequence[tuple[int, str]] = ()) -> Replay:
    """A replay of events (action, offset from BASE, bytes), with settings, and others from an event on."""
    return replay(
        [CODE[action] for action, _, _ in events],
        [BASE + offset for _, offset, _ in events],
        [size for _, _, size in events],
        parse_settings(conf),
        [(first, parse_settings(text)) for first, text in changes],
    )


def freed(offset: int, size: int) -> tuple[tuple[str, int, int], tuple[str, int, int]]:
    return ("free_requested", offset, size), ("free_completed", offset, size)


SMALL_SEGMENT = ("segment_alloc", 0, 2 * MIB)
LARGE_SEGMENT = ("segment_alloc", 0, 20 * MIB)


def test_requests_are_rounded_up_to_512_bytes_and_other_settings_left_out() -> None:
    rounded = {1: 512, 511: 512, 512: 512, 513: 1024, 1024: 1024, 1_000_000: 1_000_448}
    assert {size: int(rounded_bytes(size, AllocatorSettings())) for size in rounded} == rounded
    text = "backend:native, max_split_size_mb:128 ,garbage_collection_threshold:0.8,expandable_segments:true"
    assert parse_settings(text) == AllocatorSettings(128 * MIB, (), True)
    assert parse_settings("") == AllocatorSettings()


def test_a_small_block_is_split_if_512_bytes_remain_and_given_whole_if_less() -> None:
    history = (SMALL_SEGMENT, ("alloc", 0, MIB), ("alloc", MIB, MIB - 512), *freed(MIB, MIB - 512))
    found = played(*history, ("alloc", MIB, MIB - 1000))  # 488 of the 1000 bytes are lost to rounding, 512 remain
    assert list(found.block_bytes) == [MIB, MIB - 512, MIB - 512]
    history = (SMALL_SEGMENT, ("alloc", 0, 1024), ("alloc", 1024, 512), ("alloc", 1536, 512), *freed(1024, 512))
    assert played(*history, ("alloc", 1024, 1)).block_bytes[-1] == 512


def test_large_blocks_are_split_if_more_than_1_mib_remains_and_requests_are_small() -> None:
    assert list(played(LARGE_SEGMENT, ("alloc", 0, 19 * MIB)).block_bytes) == [20 * MIB]
    assert list(played(LARGE_SEGMENT, ("alloc", 0, 19 * MIB - 512)).block_bytes) == [19 * MIB - 512]
    found = played(LARGE_SEGMENT, ("alloc", 0, 8 * MIB), ("alloc", 8 * MIB, 11 * MIB + 512))
    assert list(found.block_bytes) == [8 * MIB, 12 * MIB]  # the rest of a split block can be given
    assert list(found.allocated_bytes) == [0, 8 * MIB, 20 * MIB]
    history = (("segment_alloc", 0, 64 * MIB), ("alloc", 0, 40 * MIB))
    assert list(played(*history).block_bytes) == [40 * MIB]
    assert list(played(*history, conf="max_split_size_mb:40").block_bytes) == [64 * MIB]
    assert list(played(*history, conf="max_split_size_mb:41").block_bytes) == [40 * MIB]


def test_settings_hold_from_where_the_script_set_them() -> None:
    segments = [("segment_alloc", at * 64 * MIB, 64 * MIB) for at in range(3)]
    blocks = [("alloc", at * 64 * MIB, 33 * MIB) for at in range(3)]
    changes = [(4, "max_split_size_mb:20"), (5, "roundup_power2_divisions:4")]
    assert list(played(*segments, *blocks, changes=changes).block_bytes) == [33 * MIB, 64 * MIB, 40 * MIB]
    assert list(played(*segments, *blocks).block_bytes) == [33 * MIB] * 3


def test_freed_neighbours_of_one_segment_are_merged() -> None:
    parts = [("alloc", offset * MIB, 5 * MIB) for offset in (0, 5, 10, 15)]
    # The middle last, so that it is merged with both sides.
    frees = [event for offset in (0, 10, 5) for event in freed(offset * MIB, 5 * MIB)]
    assert played(LARGE_SEGMENT, *parts, *frees, ("alloc", 0, 14 * MIB + 512)).block_bytes[-1] == 15 * MIB
    blocks = [(action, at * MIB, 20 * MIB) for at in (0, 20) for action in ("segment_alloc", "alloc")]
    both = (*blocks, *freed(0, 20 * MIB), *freed(20 * MIB, 20 * MIB))
    assert played(*both, ("alloc", 0, 19 * MIB)).block_bytes[-1] == 20 * MIB


def test_bytes_are_let_go_when_the_free_is_asked_for_but_given_again_only_when_it_is_completed() -> None:
    first = (LARGE_SEGMENT, ("alloc", 0, 10 * MIB), ("alloc", 10 * MIB, 10 * MIB), ("free_requested", 0, 10 * MIB))
    found = played(*first, *freed(10 * MIB, 10 * MIB), ("alloc", 10 * MIB, 9 * MIB), ("free_completed", 0, 10 * MIB))
    assert list(found.allocated_bytes) == [value * MIB for value in (0, 10, 20, 10, 0, 0, 10, 10)]
    assert list(found.free_event) == [3, 4, 8]


def test_what_is_from_before_the_history_changes_nothing_and_is_counted() -> None:
    others = (("oom", 77, 1 << 40), ("snapshot", 0, 0), ("annotate", 0, 0))
    found = played(*freed(4 * MIB, 100), LARGE_SEGMENT, ("alloc", 0, 20 * MIB), *others)
    assert found.unknown_frees == 1
    assert list(found.allocated_bytes) == [0, 0, 0, *[20 * MIB] * 4]
    # A block in a segment from before the history is as large as was asked for.
    assert list(played(("alloc", 0, 1000), *freed(0, 1000), ("alloc", 0, 300)).block_bytes) == [1024, 512]


def test_a_segment_that_comes_back_at_an_address_starts_anew() -> None:
    first = (LARGE_SEGMENT, ("alloc", 0, 6 * MIB), *freed(0, 6 * MIB), ("segment_free", 0, 20 * MIB))
    found = played(*first, ("segment_alloc", 0, 2 * MIB), ("alloc", 0, 100), ("alloc", 512, 100))
    assert list(found.block_bytes) == [6 * MIB, 512, 512]
    assert list(found.reserved_bytes) == [*[20 * MIB] * 4, 0, *[2 * MIB] * 3]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_split_mib", [None, 4, 16])
def test_a_long_history_gives_what_the_allocator_gave(seed: int, max_split_mib: int | None) -> None:
    made = random_history(seed, 3_000, 1 << 62 if max_split_mib is None else max_split_mib * MIB)
    conf = "" if max_split_mib is None else f"max_split_size_mb:{max_split_mib}"
    found = played(*((action, at - BASE, size) for action, at, size in made.history), conf=conf)
    assert list(found.block_bytes) == made.given
    assert list(found.allocated_bytes) == made.allocated
    rounded = rounded_bytes([size for action, _, size in made.history if action == "alloc"], parse_settings(""))
    assert (rounded != found.block_bytes).sum() > 20  # given whole: what the replay is for


EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize("conf", [EXPANDABLE, ""], ids=["set", "seen in the history"])
def test_expandable_segments_split_large_blocks_down_to_512_bytes(conf: str) -> None:
    found = played(("segment_map", 0, 20 * MIB), ("alloc", 0, 20 * MIB - 512), conf=conf)
    assert list(found.block_bytes) == [20 * MIB - 512]


def test_a_script_may_switch_expandable_segments_off_and_on_again() -> None:
    taken = [("segment_map", 0), ("segment_alloc", 100 * MIB), ("segment_map", 200 * MIB)]
    moves = [move for action, at in taken for move in ((action, at, 20 * MIB), ("alloc", at, 20 * MIB - 512))]
    found = played(*moves, conf=EXPANDABLE, changes=[(2, "expandable_segments:False"), (4, EXPANDABLE)])
    assert list(found.block_bytes) == [20 * MIB - 512, 20 * MIB, 20 * MIB - 512]


def test_pages_are_one_segment_of_expandable_ones() -> None:
    maps = (("segment_map", 0, 20 * MIB), ("segment_map", 20 * MIB, 20 * MIB))
    found = played(*maps, ("alloc", 0, 30 * MIB), ("alloc", 30 * MIB, 10 * MIB), conf=EXPANDABLE)
    assert list(found.block_bytes) == [30 * MIB, 10 * MIB]
    assert found.reserved_bytes[-1] == 40 * MIB
    held = (("segment_map", 0, 60 * MIB), ("alloc", 0, 3 * MIB), ("segment_unmap", 20 * MIB, 20 * MIB))
    found = played(*held, ("alloc", 3 * MIB, 17 * MIB), ("alloc", 40 * MIB, 20 * MIB), conf=EXPANDABLE)
    assert list(found.block_bytes) == [3 * MIB, 17 * MIB, 20 * MIB]
    assert found.reserved_bytes[-1] == 40 * MIB


def test_ranges_are_cut_at_either_end_and_merged_again() -> None:
    ranges = AddressRanges()
    ranges.put(0, 100, 7)
    ranges.cut(0, 10)
    ranges.cut(90, 10)
    assert ranges.to_list() == [(10, 80, 7)]
    ranges.put(90, 10, 7)
    ranges.put(100, 10, 8)
    assert ranges.to_list() == [(10, 90, 7), (100, 10, 8)]


def test_a_range_that_was_taken_is_no_neighbour_any_more() -> None:
    ranges = AddressRanges()
    ranges.put(0, 10, 7)
    assert ranges.take(0) == (10, 7)
    assert ranges.take(0) is None
    ranges.put(0, 5, 7)
    ranges.put(10, 5, 7)
    assert ranges.to_list() == [(0, 5, 7), (10, 5, 7)]


@pytest.mark.parametrize(
    ("conf", "requested", "given"),
    [
        ("roundup_power2_divisions:4", 1200 * KIB, 1280 * KIB),
        ("roundup_power2_divisions:4", 1024 * KIB, 1024 * KIB),
        ("roundup_power2_divisions:4", 2000, 2048),  # too small for four steps of 512 bytes
        ("roundup_power2_divisions:1", 1200 * KIB + 1, 1200 * KIB + 512),
        ("roundup_power2_divisions:[2:8,4:2,>:1]", 1300 * KIB, 1408 * KIB),  # below the first boundary: the first
        ("roundup_power2_divisions:[2:8,4:2,>:1]", 5 * MIB, 6 * MIB),
        ("roundup_power2_divisions:[>:4]", (40 << 30) + 1, 48 << 30),
        ("roundup_power2_divisions:[2:8,4:2,>:1],max_split_size_mb:64", 9 * MIB + 1, 9 * MIB + 512),
    ],
)
def test_requests_are_rounded_to_parts_of_powers_of_two_where_the_allocator_is_told_to(
    conf: str, requested: int, given: int
) -> None:
    assert rounded_bytes(requested, parse_settings(conf)) == given
