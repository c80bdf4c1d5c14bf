"""The host's memory of a rank on the virtual GPU, as torch's own allocators take it: by arithmetic."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest

from fakedist.analysis.blocks import host_memory, host_tables
from fakedist.analysis.recording import Recording, read_recording
from fakedist.analysis.stack_lines import stack_lines
from fakedist.options import Job
from tests.support.virtual import on_virtual_gpu

MIB = 1 << 20
JOB = Job(world_size=8, rank=0, target="train.py")
SCRIPT = """
model = torch.nn.Linear(1024, 2048, device="cuda", bias=False)
optimizer = torch.optim.SGD(model.parameters())
kept = torch.zeros(6 << 20, dtype=torch.uint8)
def step():
    model(torch.rand(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
step()
offloaded = [parameter.detach().cpu() for parameter in model.parameters()]
pinned = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
del offloaded
step()
shared = torch.empty(3 << 20, dtype=torch.uint8).share_memory_()
torch.save({"w": model.weight.cpu()}, folder / "model.pt")
staged = torch.UntypedStorage(7 << 20)
dcp.async_save({"w": model.weight}, checkpoint_id=folder / "dcp", no_dist=True).result()
with open(folder / "data", "wb") as file: file.truncate(9 << 20)
loaded = torch.from_file(str(folder / "data"), size=9 << 20, dtype=torch.uint8)
del staged
floats = torch.empty(30 << 28).normal_()
parameter = torch.nn.Parameter(floats)
parameter.grad = torch.zeros_like(floats)
torch.optim.AdamW([parameter], fused=True).step()
torch.optim.AdamW([parameter], foreach=True).step()
halves = torch.empty(8 << 30, pin_memory=True).to("cuda", torch.float16)
floats[: 1 << 32].view(1 << 16, -1).t().copy_(halves[: 1 << 32].view(-1, 1 << 16))
back = halves.to("cpu", torch.float32)
bytes_there = torch.empty(8 << 30, dtype=torch.uint8, pin_memory=True).to("cuda")
untyped = torch.UntypedStorage(30 << 30)
"""
#: Records the script into a journal.
BODY = """
    import os, resource, tempfile, torch.distributed.checkpoint as dcp
    from pathlib import Path
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.recorder import Recorder
    from fakedist.rundir.directory import JournalWriter
    from fakedist.rundir.outcome import Ending, Outcome
    from fakedist.world.files import saved, sparse_saving

    engine, folder = ValueEngine(0), Path(tempfile.mkdtemp())
    journal = JournalWriter(folder / "journal.bin")
    recorder = Recorder(journal.append, "auto", engine.execute, until="end", fast_path=CompiledFastPath(engine),
                        own_bytes=lambda: journal.num_bytes - saved.holes_bytes)
    with engine.below_dispatch(), sparse_saving(), recorder:
        exec(compile(SCRIPT, "/job/train.py", "exec"), {"torch": torch, "dcp": dcp, "folder": folder})
        recorder.close(Ending(Outcome.FINISHED, 0))
    found["folder"] = str(folder)
    found["peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found["large_is_ours"] = torch.empty(30 << 30, dtype=torch.uint8).numel() == 30 << 30  # nothing is watched now
    found["storages"] = torch.UntypedStorage.__new__.__qualname__
"""


class Seen(NamedTuple):
    folder: Path
    recording: Recording
    tables: dict[str, pd.DataFrame]
    storages: str
    peak_kib: int
    large_is_ours: bool


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    found = on_virtual_gpu(f"    SCRIPT = {SCRIPT!r}{BODY}")
    folder = Path(found["folder"])
    recording = read_recording(folder)
    yield Seen(
        folder, recording, host_tables(recording, JOB), found["storages"], found["peak_kib"], found["large_is_ours"]
    )
    shutil.rmtree(folder)


def blocks_at(seen: Seen, line: int) -> list[tuple[str, int, str, bool]]:
    lines = [*stack_lines(seen.recording.frames, seen.recording.stacks), ""]
    return [
        (row.kind, row.bytes // MIB, row.phase, row.free_us >= 0)
        for row in seen.tables["host_blocks"].itertuples()
        if lines[row.stack].startswith(f"/job/train.py:{line} ")
    ]


def test_tensors_and_pinned_memory_are_known_with_line_and_phase(seen: Seen) -> None:
    assert blocks_at(seen, 4) == [("pageable", 6, "init", False)]
    assert blocks_at(seen, 9) == [("pageable", 8, "other", True)]  # 2048 x 1024 floats, of which nothing was written
    assert blocks_at(seen, 10) == [("pinned", 8, "other", False)]  # 5 MiB: torch rounds to powers of two
    assert blocks_at(seen, 15) == [("pageable", 7, "other", True)]  # past the allocator that is set


def test_shared_memory_and_mapped_files_are_seen_when_it_is_looked_at(seen: Seen) -> None:
    memory = host_memory(seen.recording, JOB, stack_lines(seen.recording.frames, seen.recording.stacks))
    assert memory is not None
    assert max(phase.shared_bytes for phase in memory.phases) == 3 * MIB
    files = seen.tables["host_files"]
    mapped = files[~files["is_shared_memory"]]
    assert [*zip(mapped["path"], mapped["bytes"], strict=True)] == [(str(seen.folder / "data"), 9 * MIB)]


def test_a_checkpoints_bytes_are_those_of_its_files(seen: Seen) -> None:
    saves = seen.tables["saves"]
    assert saves["function"].tolist() == ["torch.save", "torch.distributed.checkpoint.async_save"]
    assert saves["asynchronous"].tolist() == [False, True]
    whole = (seen.folder / "model.pt").stat().st_size
    parts = sum(file.stat().st_size for file in (seen.folder / "dcp").iterdir())
    assert min(whole, parts) > 8 * MIB
    for written, of_files in zip(saves["written_bytes"], (whole, parts), strict=True):
        assert abs(written - of_files) < 64 << 10  # what else the process writes meanwhile counts, too
    assert ("pageable", 8, "save", True) in blocks_at(seen, 16)  # staged


def test_torchs_own_storage_is_back(seen: Seen) -> None:
    assert "made" not in seen.storages


def test_large_floats_take_no_memory_and_count_as_the_real_job_has_them(seen: Seen) -> None:
    """On a machine of any size: they are address space, and no operation on them writes there."""
    assert seen.peak_kib < 4 << 20
    assert seen.large_is_ours
    of_line = {
        line: sorted((kind, size >> 10, freed) for kind, size, _, freed in blocks_at(seen, line))
        for line in range(20, 30)
    }
    assert of_line[20] == of_line[22] == of_line[29] == [("pageable", 30, False)]
    assert of_line[23] == [("pageable", 30, True)] * 2  # a fused step makes the two moments alone
    assert len(of_line[24]) > 2
    assert of_line[25] == [("pageable", 16, True), ("pinned", 32, False)]  # torch converts on the host
    assert of_line[27] == [("pageable", 16, True), ("pageable", 32, False)]
    assert of_line[28] == [("pinned", 8, False)]
