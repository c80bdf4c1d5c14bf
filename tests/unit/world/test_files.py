"""Files that another rank took away are named by the rank that misses them."""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fakedist.rundir.tape import MovedFile, Tape
from fakedist.world.files import find_lost
from tests.unit.world.test_tapes import rank


def moved(directory: Path, script: Callable[[], object]) -> list[MovedFile]:
    """Files that rank 0 of four renames and removes."""
    with rank(0, directory):
        script()
    return Tape(directory / "0", 0).moved()


def failed(script: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        script()
    return caught.value


MOVES: dict[str, Callable[[Path, Path], object]] = {
    "rename": lambda one, other: os.rename(one, dst=other),
    "by words": lambda one, other: os.rename(dst=other, src=one),
    "replace": lambda one, other: os.replace(one, other),
    "shutil": lambda one, other: shutil.move(one, other),
    "pathlib": lambda one, other: one.replace(other),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_what_a_rank_renames_is_on_its_tape(tmp_path: Path, move: Callable[[Path, Path], object]) -> None:
    temporary, final = tmp_path / "step10-tmp", tmp_path / "step10"
    temporary.mkdir()
    (found,) = moved(tmp_path, lambda: move(temporary, final))
    assert (found.path, found.to) == (str(temporary), str(final))
    assert found.line.startswith(f"{__file__}:")


def test_what_a_rank_removes_is_on_its_tape_and_what_it_does_not_get_rid_of_is_not(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_text("x")
    (tmp_path / "marker").write_text("x")

    def script() -> None:
        shutil.rmtree(tree)
        (tmp_path / "marker").unlink()
        (tmp_path / "absent").unlink(missing_ok=True)

    assert [(each.path, each.to) for each in moved(tmp_path, script)] == [
        (str(tree), ""),
        (str(tmp_path / "marker"), ""),
    ]
    before = {name: getattr(os, name) for name in ("rename", "replace", "remove", "unlink", "rmdir")}
    with rank(0, tmp_path):
        assert os.unlink in os.supports_dir_fd
        assert {getattr(os, name) for name in before}.isdisjoint(before.values())
    assert {name: getattr(os, name) for name in before} == before


def test_a_rank_that_waits_for_what_was_renamed_says_what_became_of_it(tmp_path: Path) -> None:
    gone = MovedFile(str(tmp_path / "step10-tmp"), str(tmp_path / "step10"), "train.py:9 (save)")
    (tmp_path / "step10").mkdir()

    def waits(directory: Path) -> None:
        if not directory.exists():
            raise TimeoutError("waiting for the checkpoint's directory")

    def reads(directory: Path) -> None:
        (directory / "model.pt").read_bytes()

    for script in (waits, reads):
        lost = find_lost(failed(functools.partial(script, tmp_path / "step10-tmp")), [(0, gone)], {0: os.getcwd()})
        assert lost is not None
        assert lost.text.startswith(f"{tmp_path}/step10-tmp, which this rank looked for, is missing: rank 0, which ran")
        assert f"renamed it to {tmp_path}/step10 at train.py:9 (save)" in lost.text
        assert not lost.may_be_written


def test_a_path_of_an_object_counts_as_one_of_its_method(tmp_path: Path) -> None:
    class Checkpointer:
        def __init__(self) -> None:
            self.directory = str(tmp_path / "old")

        def save(self) -> None:
            raise RuntimeError("the directory has not come")

    lost = find_lost(failed(Checkpointer().save), [(5, MovedFile(str(tmp_path / "old"), "", ""))], {5: os.getcwd()})
    assert lost is not None
    assert "rank 5, which ran earlier, removed it." in lost.text


def test_a_file_that_only_another_rank_writes_may_be_written_by_rank_0(tmp_path: Path) -> None:
    error = failed(lambda: (tmp_path / "index.bin").read_bytes())
    alone, after_rank_0 = find_lost(error, [], {}), find_lost(error, [], {0: os.getcwd()})
    assert alone is not None
    assert after_rank_0 is not None
    assert alone.text.startswith(f"{tmp_path}/index.bin, which this rank looked for, is missing; in the real job")
    assert (alone.may_be_written, after_rank_0.may_be_written) == (True, False)


def test_a_file_that_lies_where_another_rank_ran_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there/plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    lost = find_lost(failed(lambda: Path("plan.json").read_text()), [], {0: str(tmp_path / "there")})
    assert lost is not None
    assert lost.text.endswith(f"is missing: rank 0 ran in {tmp_path}/there and has {tmp_path}/there/plan.json")


def test_what_a_rank_seems_to_wait_for_is_no_temporary_file_of_its_own(tmp_path: Path) -> None:
    def waits(marker: Path, temporary: str) -> None:
        raise TimeoutError(f"waited too long, {marker}, {temporary}")

    temporary = f"{tempfile.gettempdir()}/{tempfile.gettempprefix()}x1.ptx"
    lost = find_lost(failed(lambda: waits(tmp_path / "rank0.done", temporary)), [], {})
    assert lost is not None
    assert lost.text.startswith(f"{tmp_path}/rank0.done, for which this rank seems to wait, is missing;")
    assert find_lost(failed(lambda: waits(tmp_path, temporary)), [], {}) is None


def test_nothing_is_missed_by_an_error_of_another_kind(tmp_path: Path) -> None:
    def script(output: Path) -> None:
        raise ValueError(f"shapes do not match, nothing in {output}")

    assert find_lost(failed(lambda: script(tmp_path / "made later")), [], {}) is None
    assert find_lost(failed(lambda: subprocess.run(["no-such-launcher"])), [], {}) is None, "no rank writes a program"
