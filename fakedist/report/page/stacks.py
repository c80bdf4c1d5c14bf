"""The stacks of a run's blocks as one tree of frames, from the program inwards: what the flame graph is drawn from."""

from __future__ import annotations

import re

import numpy as np

from fakedist.analysis.recording import Array
from fakedist.report.content.memory import frame_texts
from fakedist.report.figures.memory_figures import MemoryCurve
from fakedist.report.page.drawings import Pack
from fakedist.results.run import Run
from fakedist.rundir.notes import counted
from fakedist.rundir.sources import INDUCTOR_FILE, WRAPPERS

#: Calls in the tree, and letters of a frame, so that no page grows beyond 2.5 MB.
MOST_NODES = 40_000
_MOST_LETTERS = 400
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3[.\d]*/|/torch/|^<|^\W*$|\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|so)\b"
    rf"|{INDUCTOR_FILE.pattern}"
)


def is_library(filename: str) -> bool:
    """Return whether a frame's file was installed, generated or compiled, and so is not the job's own code."""
    return filename.endswith(WRAPPERS) or _LIBRARY.search(filename) is not None


def add_stacks(pack: Pack, run: Run, curve: MemoryCurve) -> bool:
    """Add the tree: of each node its caller (0 is the root) and its frame, and the innermost node of each stack.

    Stacks with the most bytes come first. Those beyond ``MOST_NODES`` calls end at a node that says how many they are.
    Returns whether any block has a stack.
    """
    frames = run.table("frames")
    same = frames.groupby(["filename", "line", "function"], sort=False).ngroup().to_numpy()
    nodes, leaf, left_out = _tree(run.table("stacks")["frames"].tolist(), same, _heaviest(curve))
    used, frame = np.unique(np.array([number for _, number in nodes], "i8"), return_inverse=True)
    kept = frames.iloc[np.unique(same, return_index=True)[1][used]]
    texts = [text[:_MOST_LETTERS] for text in frame_texts(kept, run.manifest.cwd)]
    library = [is_library(str(name)) for name in kept["filename"]]
    parents = [parent for parent, _ in nodes]
    if left_out:
        leaf = np.where(leaf < 0, len(nodes) + 1, leaf)
        parents, frame = [*parents, 0], np.append(frame, len(texts))
        texts.append(f"({counted(len(left_out), 'stack')} with the fewest bytes: left out of this page)")
        library.append(False)
    pack.add("node_parent", parents)
    pack.add("node_frame", frame)
    pack.add("stack_node", np.append(leaf, 0))  # of blocks without a stack
    pack.add("frame_library", library)
    pack.meta["frames"] = texts
    return bool(texts)


def _heaviest(curve: MemoryCurve) -> list[int]:
    """The stacks that have blocks, most bytes first."""
    stack = curve.blocks["stack"].to_numpy()
    bytes_ = np.bincount(stack + 1, curve.blocks["bytes"].to_numpy("f8"), len(curve.lines) + 1)[1:]
    order = np.argsort(-bytes_, kind="stable")
    return [int(number) for number in order if bytes_[number] > 0]


def _tree(stacks: list[Array], same: Array, wanted: list[int]) -> tuple[list[tuple[int, int]], Array, list[int]]:
    """Nodes as (parent, frame), numbered from 1; each stack's innermost node (-1 if left out); what is left out.

    ``same`` has one number for all rows of the table ``frames`` that are equal.
    """
    numbers: dict[tuple[int, int], int] = {}
    leaf = np.zeros(len(stacks), "i8")
    for at, stack in enumerate(wanted):
        if len(numbers) + len(stacks[stack]) > MOST_NODES:
            leaf[wanted[at:]] = -1
            return list(numbers), leaf, wanted[at:]
        node = 0
        for frame in same[np.asarray(stacks[stack], "i8")][::-1].tolist():
            node = numbers.setdefault((node, frame), len(numbers) + 1)
        leaf[stack] = node
    return list(numbers), leaf, []
