"""Zeros are saved as holes, and what is read back is what was saved."""

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystem

from fakedist.world import files
from fakedist.world.files import Saved, SparseFile, sparse_saving

MIB = 1 << 20


@pytest.fixture(autouse=True)
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Saved]:
    monkeypatch.setattr(files, "saved", Saved())
    with sparse_saving():
        yield files.saved


def model() -> dict[str, torch.Tensor]:
    """128 MiB of zeros, and values among them."""
    weights = torch.zeros(32 * MIB)
    weights[5 * MIB] = 7.0
    return {"weights": weights, "bias": torch.arange(1000.0), "end": torch.zeros(4 * MIB)}


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def same(found: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in model().items())


def test_holes_of_processes_that_fork_count_too(saved: Saved) -> None:
    """Megatron Core writes a checkpoint in several processes at once."""
    children = []
    for number in range(2):
        if (child := os.fork()) == 0:
            saved.add_hole(3 * MIB)
            os._exit(number)
        children.append(child)
    saved.add_hole(MIB)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 1]
    assert saved.holes_bytes == 7 * MIB


def test_a_saved_model_takes_next_to_no_room_and_is_read_back(tmp_path: Path, saved: Saved) -> None:
    path = tmp_path / "model.pt"
    torch.save(model(), path)
    assert path.stat().st_size > 144 * MIB
    assert on_disk(path) < 6 * MIB
    assert same(torch.load(path))
    assert same(torch.load(path, mmap=True))
    assert "of tensors without values were saved as holes" in saved.notes()[0].text


def test_the_size_is_told_once_before_the_first_large_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"small": torch.zeros(MIB)}, tmp_path / "small.pt")
    assert capsys.readouterr().err == ""
    for number in range(2):
        torch.save(model(), tmp_path / f"{number}.pt")
    assert capsys.readouterr().err.count("saves 144.00 MiB of tensors") == 1


def test_an_open_file_is_written_with_holes_and_a_stream_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with FileSystem().create_stream(path, "wb") as stream:  # as torch.distributed.checkpoint writes
        stream.write(b"head")
        torch.save(model(), stream)
    assert on_disk(path) < 6 * MIB
    with path.open("rb") as file:
        assert file.read(4) == b"head"
        assert same(torch.load(io.BytesIO(file.read())))
    memory = io.BytesIO()
    torch.save(model(), memory)
    assert same(torch.load(io.BytesIO(memory.getvalue())))
    with tempfile.NamedTemporaryFile() as temporary:
        torch.save(model(), temporary)
        temporary.flush()
        assert on_disk(Path(temporary.name)) < 6 * MIB
        assert same(torch.load(temporary.name))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_is_written_with_holes(tmp_path: Path) -> None:
    checkpoint.save(model(), checkpoint_id=tmp_path, no_dist=True)
    assert sum(map(on_disk, tmp_path.iterdir())) < 6 * MIB
    found = {name: torch.ones_like(value) for name, value in model().items()}
    checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert same(found)


def test_what_was_in_a_file_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"\xff" * 160 * MIB)
    with path.open("r+b") as file:
        torch.save(model(), file)
        file.truncate()
    assert same(torch.load(path))
    path.write_bytes(b"before")
    with path.open("ab") as file:
        torch.save(model(), file)
    assert path.read_bytes()[:6] == b"before"


def test_a_file_that_ends_in_a_hole_is_as_long_as_what_was_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as opened:
        file = SparseFile(opened)
        file.write(b"x" * 10 + bytes(4 * MIB))
        file.end()
    assert (tmp_path / "file").read_bytes() == b"x" * 10 + bytes(4 * MIB)
    with pytest.raises(RuntimeError, match="Parent directory"):  # torch's own error
        torch.save(model(), os.fspath(tmp_path / "no" / "model.pt"))
