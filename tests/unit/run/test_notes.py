from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest

from fakedist.run import notes, snapshot_notes, time_notes


def codes_of(module: ModuleType) -> dict[str, str]:
    """The code that each function of a module gives its note."""
    found = {}
    for function in ast.parse(inspect.getsource(module)).body:
        if isinstance(function, ast.FunctionDef) and ast.unparse(function.returns or ast.Constant("")) == "Note":
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            made = [call.args[0] for call in calls if ast.unparse(call.func) == "Note"]
            (code,) = {ast.literal_eval(argument) for argument in made}
            found[function.name] = code
    return found


@pytest.mark.parametrize("module", [notes, time_notes, snapshot_notes])
def test_a_notes_code_is_the_name_of_the_function_that_makes_it(module: ModuleType) -> None:
    found = codes_of(module)
    assert found
    assert {name: code for name, code in found.items() if name != code} == {}


def test_no_two_notes_have_one_code() -> None:
    assert not set(codes_of(notes)) & set(codes_of(time_notes))


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
