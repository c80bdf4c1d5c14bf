"""The host's memory in words: what the node needs and has, and how long a checkpoint takes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fakedist.options import Job
from fakedist.report.content.host_memory import host_figures, host_memory_sheets, node_remarks, short_figures
from fakedist.rundir import notes
from fakedist.rundir.host_memory import HostLine, HostMemory, HostPhase, NodeMemory, Save

MIB, GIB = 1 << 20, 1 << 30
PEAK = HostPhase(2, "save", 81 * GIB, 64 * GIB, 16 * GIB, GIB, 0, 512 * MIB, 8 * GIB, 0, 200.0 * MIB)
NODE = NodeMemory(8, [0], 2, "save", 648 * GIB, 200 * GIB, 2, "save", 480 * GIB)
SAVES = [
    Save("torch.distributed.checkpoint.async_save", "/job/train.py:88 (save)", 2, 0, 9, 5 * 10**9, True),
    Save("torch.save", "/job/train.py:90 (save)", 2, 0, 9, -1, False),
]
LINES = [HostLine("/job/train.py:40 (main)", "pageable", 64 * GIB, 12), HostLine("", "pinned", 16 * GIB, 1)]
MEMORY = HostMemory(PEAK, [replace(PEAK, phase="forward", peak_bytes=GIB), PEAK], LINES, 12 * GIB, NODE, SAVES, 10**9)


def test_figures_tell_the_rank_its_node_and_what_is_besides() -> None:
    assert [(fact.name, fact.text, fact.more) for fact in host_figures(MEMORY)] == [
        ("this rank", "81.00 GiB", "step 2, save: 64.00 GiB pageable, 16.00 GiB pinned and 1.00 GiB /dev/shm"),
        ("of it", "4.00 GiB", "in torch's cache of pinned memory, or added by its rounding to powers of two"),
        (
            "a node of 8",
            "648.00 GiB",
            "step 2, save: at most, if the other 7 hold what rank 0 holds; 200.00 GiB at least, as it may save alone",
        ),
        ("the node has", "480.00 GiB", "may be too little: up to 168.00 GiB are missing"),
        ("ahead, at most", "512.00 MiB", "batches that workers have in /dev/shm"),
        ("files in memory", "8.00 GiB", "pages that the kernel can drop"),
        (
            "untracked, at most",
            "200.00 MiB",
            "of a rank: smaller tensors, Python's and NumPy's objects, libraries and this recording",
        ),
    ]


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (500 * GIB, 648 * GIB, "too little: 20.00 GiB are missing at least"),
        (100 * GIB, 400 * GIB, "80.00 GiB to spare"),
    ],
)
def test_a_node_has_enough_or_too_little(low: int, high: int, text: str) -> None:
    figures = {fact.name: fact.more for fact in host_figures(replace(MEMORY, node=_node(low, high)))}
    assert figures["the node has"] == text


def _node(low: int, high: int) -> NodeMemory:
    return replace(NODE, low_bytes=low, high_bytes=high)


def test_a_save_takes_its_bytes_at_the_rate_of_the_node_for_one_rank_to_all() -> None:
    saves = host_memory_sheets(MEMORY, "/job")[-1]
    assert [(column.name, [*column.cells]) for column in saves.columns] == [
        ("checkpoint", ["dcp.async_save (goes on)", "torch.save"]),
        ("step", ["2", "2"]),
        ("written", ["4.66 GiB", "not known"]),
        ("takes, estimated", ["5.00 s to 40.0 s", "not known"]),
        ("line", ["train.py:88 (save)", "train.py:90 (save)"]),
    ]
    assert [text[:17] for text in saves.remarks] == ["takes: at 1 GB/s ", "not known: anothe"]
    assert len(host_memory_sheets(replace(MEMORY, storage_bytes_per_s=None), "/job")[-1].columns) == 4


def test_lines_and_phases_are_listed() -> None:
    phases, lines, _ = host_memory_sheets(MEMORY, "/job")
    assert [*phases.columns[1].cells] == ["forward", "save"]
    assert [*lines.columns[0].cells] == ["train.py:40 (main)", "(no line)"]
    assert [*lines.columns[2].cells] == ["79.0%", "19.8%"]


def test_a_short_report_has_it_where_it_is_much_or_was_asked() -> None:
    assert short_figures(NODE)[0].more == "in step 2, save, for a node of 8 ranks that has 480.00 GiB"
    assert short_figures(replace(NODE, limit_bytes=None))[0].more == "in step 2, save, for a node of 8 ranks"
    assert short_figures(replace(NODE, limit_bytes=None, high_bytes=31 * GIB)) == []


def test_the_note_tells_what_is_certain_first() -> None:
    note = "a node of 8 ranks needs {} of host memory in step 2, save, and has 480.00 GiB (--host-memory): the host"
    assert notes.node_memory_short(NODE).text.startswith(note.format("up to 648.00 GiB"))
    assert notes.node_memory_short(_node(500 * GIB, 648 * GIB)).text.startswith(note.format("at least 500.00 GiB"))


def run_of_rank(rank: int, *phases: HostPhase) -> Any:
    memory = replace(MEMORY, phases=list(phases))
    job = Job(world_size=16, rank=rank, target="train.py", host_memory_bytes=100 * GIB)
    return SimpleNamespace(summary=SimpleNamespace(host_memory=memory), manifest=SimpleNamespace(job=job))


def test_ranks_of_a_node_that_ran_are_added_up() -> None:
    training = HostPhase(2, "forward", 10 * GIB)
    runs = [run_of_rank(0, training, PEAK), run_of_rank(1, training), run_of_rank(8, training)]
    (remark,) = node_remarks(runs)
    assert remark == (
        "node 0 of 8 ranks needs 151.00 GiB of host memory in step 2, save: if the other 6 hold what rank 1 holds; "
        "it has 100.00 GiB: too little: 51.00 GiB are missing at least"
    )
    assert node_remarks(runs[1:]) == []
