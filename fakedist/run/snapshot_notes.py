"""Notes on what a memory snapshot of torch has and lacks. A function makes one note; its name is the note's code."""

from __future__ import annotations

from collections.abc import Sequence

from fakedist.run.notes import Note


def snapshot_starts_late(num_blocks: int, bytes_: int) -> Note:
    """The snapshot's history is cut at its beginning."""
    were = "1 block was" if num_blocks == 1 else f"{num_blocks} blocks were"
    text = (
        f"{were} alive before the history begins ({bytes_} bytes): shown at its beginning, in sizes rounded to 512 "
        "bytes; a peak before that is not in the snapshot"
    )
    return Note("snapshot_starts_late", text)


def snapshot_action_unknown(name: str, count: int) -> Note:
    """The snapshot has entries of an unknown kind."""
    return Note("snapshot_action_unknown", f"entries of the unknown action {name!r} were left out: {count}")


def snapshot_of_several_devices(device: int, others: Sequence[int]) -> Note:
    """The snapshot has the history of other devices too."""
    named = ", ".join(f"cuda:{other}" for other in others)
    return Note("snapshot_of_several_devices", f"this is cuda:{device}; the snapshot also has a history of {named}")


def snapshot_without_history() -> Note:
    """The snapshot has segments alone."""
    text = "the snapshot has no history (torch.cuda.memory._record_memory_history was off): its end is shown"
    return Note("snapshot_without_history", text)


def snapshot_without_layers() -> Note:
    """A snapshot knows neither layers nor steps."""
    return Note("snapshot_without_layers", "a snapshot of torch has no layers, phases or categories")
