from __future__ import annotations

import pytest

from fakedist.errors import JobError
from fakedist.units import (
    UNLIMITED_BYTES,
    format_age,
    format_bytes,
    format_flops,
    format_rank_list,
    format_us,
    parse_bytes,
    parse_rank_list,
    parse_us,
)
from fakedist.visible import visible, visible_lines


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.00 KiB"),
        (35_651_584, "34.00 MiB"),
        (72 << 30, "72.00 GiB"),
        ((1 << 40) * 3 / 2, "1.50 TiB"),
        (-(3 << 19), "-1.50 MiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [
        (0, "0 µs"),
        (0.04, "0 µs"),
        (-0.04, "0 µs"),
        (0.06, "0.1 µs"),
        (2.44, "2.4 µs"),
        (99.96, "100 µs"),
        (850, "850 µs"),
        (999.7, "1.00 ms"),
        (9_994, "9.99 ms"),
        (9_996, "10.0 ms"),
        (73_000, "73.0 ms"),
        (2_714_000, "2.71 s"),
        (12_600_000, "12.6 s"),
        (200_000_000, "3 min 20 s"),
    ],
)
def test_durations_are_shown_in_the_unit_that_fits(duration_us: float, text: str) -> None:
    assert format_us(duration_us) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("72 GiB", 72 << 30),
        ("80GB", 80_000_000_000),
        ("1.5gib", 3 << 29),
        ("16384 mib", 16 << 30),
        ("100B", 100),
        ("unlimited", UNLIMITED_BYTES),
        (" Unlimited ", UNLIMITED_BYTES),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "80", "GiB", "80 GiBs", "80G", "-80GiB", "0GiB", "1e3GiB", "80 80 GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(JobError) as error:
        parse_bytes(text)
    assert "80GiB" in error.value.hint


def test_operations_are_in_thousands_as_gpus_are_sold() -> None:
    assert (format_flops(989.44e12), format_flops(1.5e15), format_flops(0)) == ("989.4 TFLOP", "1.5 PFLOP", "0 FLOP")


@pytest.mark.parametrize("text", ["850 us", "850 µs", "850 \u03bcs", ".85 ms"])
def test_microseconds_are_read_in_each_spelling(text: str) -> None:
    assert parse_us(text) == 850


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-1, "0 s"), (59.9, "59 s"), (60, "1 min"), (7199, "1 h"), (86_400, "24 h"), (200_000, "2 days")],
)
def test_ages_are_in_the_largest_unit_that_fits(age_s: float, text: str) -> None:
    assert format_age(age_s) == text


RANKS = {"0": (0,), "8,0,4": (8, 0, 4), "0-3": (0, 1, 2, 3), "5-5": (5,), "0-15:4": (0, 4, 8, 12)}


@pytest.mark.parametrize(("text", "found"), [*RANKS.items(), ("0,8-12:2", (0, 8, 10, 12))])
def test_ranks_are_numbers_and_ranges(text: str, found: tuple[int, ...]) -> None:
    assert parse_rank_list(text) == found


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "3-1", "0-8:0", "4:2", "0,,1", "0, 1", "1-2-3", "0-", "0-99999999999", "+1"]
)
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a list of ranks"):
        parse_rank_list(text)
    with pytest.raises(JobError, match="0-3,2 has rank 2 twice"):
        parse_rank_list("0-3,2")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0,1"), (range(8), "0-7"), (range(0, 64, 8), "0-56:8"), ((7, 5, 3), "7,5,3")],
)
def test_ranks_are_read_as_they_were_written(ranks: tuple[int, ...], text: str) -> None:
    assert format_rank_list(ranks) == text
    assert not text or parse_rank_list(text) == tuple(ranks)


def test_control_characters_and_what_turns_the_direction_of_text_are_written_out_and_other_letters_stay() -> None:
    assert visible("\x1b[31mred\x07\n\x7f\x9b1m") == "\\x1b[31mred\\x07\\x0a\\x7f\\x9b1m"
    assert visible("\udc9b") == "\\x9b"  # the byte 0x9b of a file name
    assert visible("rm \u202egnp.\u2066\u2028x") == "rm \\u202egnp.\\u2066\\u2028x"
    assert visible("größe µs 層 \udce9") == "größe µs 層 \udce9"


def test_lines_stay_lines_and_a_long_name_is_cut_and_says_how_long_it_was() -> None:
    assert visible_lines("a\n\tb\r\x1b\u2069\n") == "a\n\tb\\x0d\\x1b\\u2069\n"
    assert visible("a" * 5_000_000) == "a" * 300 + "... (5,000,000 characters)"
