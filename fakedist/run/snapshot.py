"""memory_snapshot.pickle: the recorded history in torch's format, for pytorch.org/memory_viz."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import IO, NoReturn

from fakedist.errors import RunDirectoryError
from fakedist.run.directory import SNAPSHOT_NAME


def write_snapshot(run_directory: Path, pieces: Iterable[bytes]) -> None:
    """Write a snapshot atomically.

    Args:
        run_directory: The run directory.
        pieces: The pickle, in pieces.
    """
    path = run_directory / SNAPSHOT_NAME
    scratch = path.with_name(f".{SNAPSHOT_NAME}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.writelines(pieces)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def stack_frames(frames: Iterable[tuple[str, int, str]]) -> list[dict[str, object]]:
    """Frames as torch writes them."""
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in frames]


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, strings and numbers, and refuses anything that would call code."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RunDirectoryError(
            f"{self._path} tries to run {module}.{name}, which no memory snapshot does: nothing was run",
            "a snapshot is what torch.cuda.memory._dump_snapshot() writes",
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside the file")


def read_snapshot(path: Path) -> dict[str, object]:
    """Read a snapshot from any torch since 2.1: ``segments``, ``device_traces`` and whatever else it contains.

    Raises:
        RunDirectoryError: The file cannot be read, is not a snapshot, or is a pickle that tries to run code.
    """
    hint = "a snapshot is what torch.cuda.memory._dump_snapshot() writes"
    try:
        with path.open("rb") as file:
            found = _PlainUnpickler(file, path).load()
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", hint) from error
    except RunDirectoryError:
        raise
    except Exception as error:  # a damaged pickle can raise almost anything
        raise RunDirectoryError(f"{path} is not a memory snapshot: {error}", hint) from error
    if isinstance(found, list):  # torch.cuda.memory.memory_snapshot(), which has no history
        found = {"segments": found}
    if not isinstance(found, dict) or not isinstance(found.get("segments"), list):
        raise RunDirectoryError(f"{path} is not a memory snapshot: it has no segments", hint)
    if not isinstance(found.setdefault("device_traces", []), list):
        raise RunDirectoryError(f"{path} is not a memory snapshot: its device_traces are not a list", hint)
    return found
