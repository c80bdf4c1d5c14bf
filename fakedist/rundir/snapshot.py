"""memory_snapshot.pickle: the recorded history in torch's format, for pytorch.org/memory_viz."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fakedist.rundir.directory import SNAPSHOT_NAME
from fakedist.temporary import replacing


def write_snapshot(run_directory: Path, pieces: Iterable[bytes]) -> None:
    """Write a pickled snapshot, in pieces, atomically."""
    with replacing(run_directory / SNAPSHOT_NAME) as path, path.open("wb") as file:
        file.writelines(pieces)


def stack_frames(frames: Iterable[tuple[str, int, str]]) -> list[dict[str, object]]:
    """Frames as torch writes them."""
    return [{"filename": filename, "line": line, "name": name} for filename, line, name in frames]
