"""memory_snapshot.pickle: the recorded history in torch's format, for pytorch.org/memory_viz."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fakedist.bounded import ForeignCodeError, UnreadableError, load_builtins, open_file
from fakedist.errors import RunDirectoryError
from fakedist.rundir.directory import SNAPSHOT_NAME
from fakedist.temporary import replacing

#: What to type about a file that is not a snapshot.
SNAPSHOT_HINT = "a snapshot is what torch.cuda.memory._dump_snapshot() writes"


def write_snapshot(run_directory: Path, pieces: Iterable[bytes]) -> None:
    """Write a pickled snapshot, in pieces, atomically."""
    with replacing(run_directory / SNAPSHOT_NAME) as path, path.open("wb") as file:
        file.writelines(pieces)


def stack_frames(frames: Iterable[tuple[str, int, str]]) -> list[dict[str, object]]:
    """Frames as torch writes them."""
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in frames]


def read_snapshot(path: Path) -> dict[str, object]:
    """Read a snapshot from any torch since 2.1: ``segments``, ``device_traces`` and whatever else it contains.

    Raises:
        RunDirectoryError: The file cannot be read, is not a snapshot, or is a pickle that tries to run code.
    """
    try:
        with open_file(path) as file:
            snapshot = load_builtins(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}", SNAPSHOT_HINT) from error
    except ForeignCodeError as error:
        raise RunDirectoryError(
            f"{path} tries to run {error.name}, which no memory snapshot does: nothing was run", SNAPSHOT_HINT
        ) from None
    except UnreadableError as error:
        raise RunDirectoryError(f"{path} is not a memory snapshot: {error}", SNAPSHOT_HINT) from error
    if isinstance(snapshot, list):  # torch.cuda.memory.memory_snapshot(), which has no history
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("segments"), list):
        raise RunDirectoryError(f"{path} is not a memory snapshot: it has no segments", SNAPSHOT_HINT)
    if not isinstance(snapshot.setdefault("device_traces", []), list):
        raise RunDirectoryError(f"{path} is not a memory snapshot: its device_traces are not a list", SNAPSHOT_HINT)
    return snapshot
