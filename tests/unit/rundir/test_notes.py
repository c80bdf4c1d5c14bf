from __future__ import annotations

import pytest

from fakedist.rundir import notes, time_notes


def test_a_notes_code_is_the_name_of_the_function_that_makes_it() -> None:
    assert notes.torch_not_imported() == notes.Note("torch_not_imported", notes.torch_not_imported().text)
    assert notes.started_again("os.environ").code == "started_again"


def test_each_warning_is_a_note_that_is_made() -> None:
    assert [code for code in notes.WARNINGS if not hasattr(notes, code) and not hasattr(time_notes, code)] == []


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
