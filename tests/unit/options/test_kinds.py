from __future__ import annotations

import pytest

from fakedist.options import kinds
from fakedist.options.kinds import RefusedError, ValueKind
from fakedist.options.making import option_named


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        (kinds.whole_number(), "8", "is a whole number, not '8'"),
        (kinds.whole_number(), True, "is a whole number, not True"),
        (kinds.whole_number(most=128), 129, "is at most 128, not 129"),
        (kinds.rank_list(), [], "is a rank or a list of ranks, not []"),
        (kinds.rank_list(), [0, "1"], "is a rank or a list of ranks, not [0, '1']"),
        (kinds.rank_list(), [1, 1], "names a rank twice: [1, 1]"),
        (kinds.rank_list(), "0-", "cannot be read: '0-' is not a list of ranks"),
        (kinds.seconds(), "long", "is a number of seconds, not 'long'"),
        (kinds.one_of(("a", "b")), "c", "is one of a, b, not 'c'"),
        (kinds.one_of(("a", "b")), ["a"], "is one of a, b, not ['a']"),
        (kinds.num_steps_or(("auto",)), "2", "is a number of steps or auto, not '2'"),
        (kinds.num_steps_or(("auto",)), False, "is a number of steps or auto, not False"),
        (kinds.memory_size(1 << 20), "80", "cannot be read: '80' is not a size with a unit"),
        (kinds.memory_size(1 << 20), "1 KiB", "must be 1.00 MiB or more, not 1.00 KiB"),
        (kinds.switch(), 1, "is true or false, not 1"),
        (kinds.plain_text(), "", "is a text, not ''"),
        (kinds.variables(), {"A": True}, "maps names to texts, and A is True"),
        (kinds.variables(), "A=1", "maps names to texts, unlike 'A=1'"),
        (kinds.variables(), ["A=1"], "maps names to texts, unlike ['A=1']"),
        (kinds.variables(), ["ab"], "maps names to texts, unlike ['ab']"),
        (kinds.variables(), {"A=B": "1"}, "maps names to texts, and 'A=B' is not a variable's name"),
        (kinds.variables(), {"": "1"}, "maps names to texts, and '' is not a variable's name"),
        (kinds.variables(), {"A": "1\0"}, "maps names to texts, and A is '1\\x00'"),
        (kinds.run_paths(), [1], "is a path or a list of paths, not [1]"),
        (kinds.shell_words(), "'a", 'cannot be split into words: no closing quotation in "\'a"'),
        (kinds.shell_words(), [1], "is a list of texts, not [1]"),
    ],
)
def test_a_value_of_another_kind_is_refused(kind: ValueKind, value: object, told: str) -> None:
    with pytest.raises(RefusedError) as error:
        kind.read(value)
    assert error.value.predicate == told


@pytest.mark.parametrize(
    ("kind", "texts", "stored"),
    [
        (kinds.whole_number(), ["8"], 8),
        (kinds.seconds(), ["1.5"], 1.5),
        (kinds.seconds(), ["600"], 600),  # as JSON gives whole numbers
        (kinds.num_steps_or(("auto",)), ["auto"], "auto"),
        (kinds.num_steps_or(("auto",)), ["3"], 3),
        (kinds.memory_size(1), ["80GiB"], 80 << 30),
        (kinds.memory_size(1), ["unlimited"], 1 << 46),
        (kinds.memory_size(1), ["1000B"], 1000),
        (kinds.variables(), ["B=b=c", "A="], (("A", ""), ("B", "b=c"))),
        (kinds.run_paths(), ["/a b,/c", "/d"], ("/a b", "/c", "/d")),
        (kinds.shell_words(), ["a 'b c'"], ("a", "b c")),
    ],
)
def test_texts_become_the_stored_value_and_back(kind: ValueKind, texts: list[str], stored: object) -> None:
    assert kind.read(kind.from_texts(texts)) == stored
    assert kind.read(kind.from_texts(kind.texts(stored))) == stored
    assert kind.read(stored) == stored


@pytest.mark.parametrize("text", ["A", "=1", ""])
def test_a_variable_needs_a_name_and_an_equals_sign(text: str) -> None:
    with pytest.raises(RefusedError, match="is KEY=VALUE, not"):
        kinds.variables().from_texts([text])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("world_size", 10**12, "is at most 16777216, not 1000000000000"),
        ("seed", 10**22, "is at most 18446744073709551615, not 1"),
        ("seed", 10**4000, r"\.\.\. \(4,001 characters\)"),
        ("gpu_memory", "999999999TiB", "is at most 64.00 TiB or unlimited"),
        ("gpu_memory", "9" * 400 + "TiB", "is not a size with a unit"),
        ("timeout", float("inf"), "must be more than 0 seconds, not inf"),
    ],
)
def test_numbers_beyond_what_a_job_has_are_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(kinds.RefusedError, match=said):
        option_named(name).kind.read(value)
