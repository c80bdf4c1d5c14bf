"""The host's memory in a run's summary. Bytes and microseconds throughout."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class HostPhase:
    """A phase of a step, and the most of the host's memory that the rank held in it, in order.

    Attributes:
        step: Step.
        phase: Phase; `save` and `load` are while a checkpoint is written or read, whatever the phase then.
        peak_bytes: The most, of these three kinds together.
        pageable_bytes: Of it, tensors of 1 MiB and more.
        pinned_bytes: Of it, pinned memory, as much as was taken for it.
        shared_bytes: Of it, what was mapped of /dev/shm.
        named_bytes: Of that, segments with a name, which other ranks of the node may map, too.
        prefetched_bytes: The most that workers of DataLoaders can have had in /dev/shm besides.
        mapped_bytes: Files in memory. The kernel can drop their pages, and all ranks share those of one file.
        private_bytes: Of them, files whose pages become the rank's own where it writes.
        other_bytes: What malloc had given beyond tensors of 1 MiB: to smaller ones, Python's and NumPy's objects,
            libraries and the recording itself; the most at a few moments. None where it was not looked at.
    """

    step: int
    phase: str
    peak_bytes: int = 0
    pageable_bytes: int = 0
    pinned_bytes: int = 0
    shared_bytes: int = 0
    named_bytes: int = 0
    prefetched_bytes: int = 0
    mapped_bytes: int = 0
    private_bytes: int = 0
    other_bytes: float | None = None


@dataclass(frozen=True)
class HostLine:
    """The host's memory at its peak that a line allocated.

    Attributes:
        line: ``file:line (function)``; empty in autograd's own threads.
        kind: pageable or pinned.
        bytes: Bytes.
        num_blocks: Blocks.
    """

    line: str
    kind: str
    bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Save:
    """A checkpoint that was written, in order.

    Attributes:
        function: The function that wrote it.
        line: The script's line that called it.
        step: Step.
        begin_us: Unix time when it was called.
        end_us: When it returned.
        written_bytes: Bytes that the rank wrote to files, *measured*; -1 if another process writes it, or if it was
            not done at the run's end.
        asynchronous: Whether it goes on after it returned.
    """

    function: str
    line: str
    step: int
    begin_us: int
    end_us: int
    written_bytes: int
    asynchronous: bool


@dataclass(frozen=True)
class NodeMemory:
    """The host's memory of a node at its worst phase, *simulated*: ranks that did not run are copies of one that did.

    Attributes:
        num_ranks: Ranks on the node.
        recorded: Those that ran.
        step: Step of the most.
        phase: Phase of the most.
        high_bytes: If all others do as the last of ``recorded`` did.
        low_bytes: If the others do not do what it did outside of training (before the first step, between steps, in an
            evaluation, while it saved or loaded), and if named segments of /dev/shm are shared.
        low_step: Step of that most.
        low_phase: Phase of that most.
        limit_bytes: What the node has, by ``--host-memory``; None if it was not said.
    """

    num_ranks: int
    recorded: list[int]
    step: int
    phase: str
    high_bytes: int
    low_bytes: int
    low_step: int
    low_phase: str
    limit_bytes: int | None = None


@dataclass(frozen=True)
class HostMemory:
    """The host's memory of the rank: ``peak`` is what is known exactly, *measured*.

    Attributes:
        peak: The phase with the most.
        phases: All phases.
        lines: What was held at the peak by line, most first.
        pinned_used_bytes: Of the pinned memory at the look nearest to the peak, what tensors held; the rest is torch's
            cache, and what rounding to powers of two added. None where torch does not say it.
        node: The node.
        saves: Checkpoints, in order.
        storage_bytes_per_s: What a node writes to storage, by ``--storage``; None if it was not said.
        unknown: What is not known, one sentence each.
    """

    peak: HostPhase
    phases: list[HostPhase]
    lines: list[HostLine]
    pinned_used_bytes: int | None
    node: NodeMemory
    saves: list[Save]
    storage_bytes_per_s: int | None = None
    unknown: list[str] = field(default_factory=list)
