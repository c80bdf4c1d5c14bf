from __future__ import annotations

import pytest

from fakedist.rundir import notes, time_notes
from fakedist.rundir.outcome import BY_ITSELF, Ending, Outcome


def test_a_notes_code_is_the_name_of_the_function_that_makes_it() -> None:
    assert notes.torch_not_imported() == notes.Note("torch_not_imported", notes.torch_not_imported().text)
    assert notes.started_again("os.environ").code == "started_again"


def test_warnings_of_both_modules_are_ordered_by_their_gravity() -> None:
    assert [notes.GRAVITIES[code] for code in time_notes.WARNINGS] == sorted(set(notes.GRAVITIES.values()))
    assert list(time_notes.WARNINGS[:2]) == ["snapshot_ran_out", "no_last_record"]
    order = [time_notes.WARNINGS.index(code) for code in ("recording_cut", "values_made_up", "estimate_failed")]
    assert order == sorted(order)
    assert "started_again" not in time_notes.WARNINGS


def test_a_warning_is_made_like_any_note() -> None:
    assert notes.recording_cut().code == "recording_cut"
    assert time_notes.timed_early(3) == notes.Note("timed_early", time_notes.timed_early(3).text)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([], ""),
        (["recomputation"], "recomputation"),
        (["copies", "all-gathers"], "copies and all-gathers"),
        (["copies", "sends", "all-gathers"], "copies, sends and all-gathers"),
        (["copies", "sends and receives"], "copies, and sends and receives"),
        (["copies", "sends and receives", "all-gathers"], "copies, sends and receives, and all-gathers"),
    ],
)
def test_items_are_listed_as_in_a_sentence(items: list[str], text: str) -> None:
    assert notes.listed(items) == text


def test_one_is_not_many() -> None:
    assert notes.tape_answered(1, "a tape").text == "1 call was answered from a tape"
    assert notes.tape_answered(1_200, "a tape").text == "1,200 calls were answered from a tape"
    assert notes.not_answered("cudaFoo", 1).text.startswith("cudaFoo is not answered by the virtual GPU (1 call)")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0%"), (0.001, "<1%"), (0.01, "1%"), (0.83, "83%"), (0.99, "99%"), (0.9999, ">99%"), (1.0, "100%")],
)
def test_only_all_is_100_percent(share: float, text: str) -> None:
    assert notes.share_text(share) == text


@pytest.mark.parametrize(
    ("ending", "is_accident"),
    [
        (Ending(Outcome.KILLED, 139, "by SIGSEGV"), True),
        (Ending(Outcome.KILLED, 134, "by SIGABRT"), True),
        (Ending(Outcome.KILLED, 139, f"by SIGSEGV{BY_ITSELF}"), False),
        (Ending(Outcome.KILLED, 137, "by SIGKILL; the machine may have run out of memory"), False),
        (Ending(Outcome.KILLED, 137, "by SIGKILL"), False),
        (Ending(Outcome.KILLED, 143, "with fakedist profile, which was killed"), False),
        (Ending(Outcome.HOST_MEMORY, 137, "its processes held 9 GiB"), False),
        (Ending(Outcome.EXCEPTION, 1, "by SIGSEGV"), False),
    ],
)
def test_an_accident_is_a_signal_of_neither_the_script_nor_a_limit(ending: Ending, is_accident: bool) -> None:
    assert ending.is_accident == is_accident
