"""Where a command reads a file, anything may lie: it is read, or one line says what is wrong with it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile.damaging import damage
from tests.hostile.fuzzing import bounded_commands, bounded_growth, told
from tests.hostile.inputs import INPUTS, ODD, Input, make_good

#: Without it, some of what may lie in place of a file is tried.
IS_LONG = "FAKEDIST_FUZZ" in os.environ
pytestmark = pytest.mark.timeout(7200 if IS_LONG else 900)  # for each test, where one hangs


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield make_good(tmp_path_factory.mktemp("inputs") / "good", monkeypatch)


def test_each_of_them_is_read_as_it_is(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "where").mkdir()
    monkeypatch.chdir(tmp_path / "where")
    codes = {}
    for each in INPUTS:
        shutil.copytree(good, tmp_path / "copy")
        codes[f"{each}"] = told(tmp_path / "copy" / each.name, *each.words(tmp_path / "copy"), named=each.named)
        shutil.rmtree(tmp_path / "copy")
    # The traces and the report are not of this run.
    assert {name for name, code in codes.items() if code} == {each for each in codes if each.startswith("calibrate-")}


@pytest.mark.parametrize("each", INPUTS, ids=lambda each: f"{each}")
def test_what_lies_in_place_of_a_file_is_told_in_one_line(
    each: Input, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "where").mkdir()
    monkeypatch.chdir(tmp_path / "where")
    with bounded_growth():
        for name in sorted(ODD) if IS_LONG else random.Random(f"{each}").sample(sorted(ODD), 2):
            copy = tmp_path / "copy"
            shutil.copytree(good, copy)
            ODD[name](copy / each.name)
            told(copy / each.name, *each.words(copy), named=each.named)
            shutil.rmtree(copy)
    assert not list((tmp_path / "where").iterdir())


@pytest.mark.parametrize("each", INPUTS, ids=lambda each: f"{each}")
@given(data=st.data())
@bounded_commands
def test_what_was_changed_in_a_file_is_told_in_one_line(
    each: Input, good: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    copy = tmp_path_factory.getbasetemp() / "changed"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(good, copy)
    damage(copy / each.name, data)
    (copy / "where").mkdir()
    with bounded_growth(), contextlib.chdir(copy / "where"):
        told(copy / each.name, *each.words(copy), named=each.named)
    assert not list((copy / "where").iterdir())
