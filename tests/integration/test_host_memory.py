"""The host's memory of a rank on the virtual GPU, as torch's own allocators take it: by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.virtual import on_virtual_gpu

MIB = 1 << 20
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
"""
#: Records the script, and reads what it recorded.
BODY = """
    import tempfile, os, torch.distributed.checkpoint as dcp
    from pathlib import Path
    from fakedist.analysis.host_blocks import host_memory, host_tables
    from fakedist.analysis.recording import JournalReading
    from fakedist.analysis.stack_lines import stack_lines
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.options import Job
    from fakedist.record.recorder import Recorder
    from fakedist.rundir.outcome import Ending, Outcome
    from fakedist.world.files import saved, sparse_saving

    records, engine = [], ValueEngine(0)
    fast_path = CompiledFastPath(engine)
    recorder = Recorder(records.append, "auto", engine.execute, until="end", fast_path=fast_path,
                        own_bytes=lambda: -saved.holes_bytes)
    folder = Path(tempfile.mkdtemp())
    script = compile(SCRIPT, "/job/train.py", "exec")
    with engine.below_dispatch(), sparse_saving(), recorder:
        exec(script, {"torch": torch, "dcp": dcp, "folder": folder})
        recorder.close(Ending(Outcome.FINISHED, 0))
    reading = JournalReading()
    for record in records:
        reading.take(record)
    reading.join()
    job = Job(world_size=8, rank=0, target="train.py")
    memory = host_memory(reading.recording, job, stack_lines(reading.recording.frames, reading.recording.stacks))
    tables = host_tables(reading.recording, job)
    lines = [*stack_lines(reading.recording.frames, reading.recording.stacks), ""]
    blocks = tables["host_blocks"]
    found["blocks"] = [[k, int(b), p, lines[s]] for k, b, p, s in
                       zip(blocks["kind"], blocks["bytes"], blocks["phase"], blocks["stack"])]
    found["freed"] = [bool(us >= 0) for us in blocks["free_us"]]
    found["saves"] = [[save.function, save.written_bytes, save.asynchronous] for save in memory.saves]
    found["files"] = [os.path.getsize(folder / "model.pt"),
                      sum(os.path.getsize(file) for file in (folder / "dcp").iterdir())]
    found["shared"] = max(phase.shared_bytes for phase in memory.phases)
    found["mapped"] = [[path.split("/")[-1], int(size)] for path, size, shm in
                       zip(tables["host_files"]["path"], tables["host_files"]["bytes"],
                           tables["host_files"]["is_shared_memory"]) if not shm]
    found["back"] = torch.UntypedStorage.__new__.__qualname__
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return on_virtual_gpu(f"    SCRIPT = {SCRIPT!r}{BODY}")


def blocks_at(seen: dict[str, Any], line: int) -> list[tuple[str, int, str, bool]]:
    return [
        (kind, size // MIB, phase, freed)
        for (kind, size, phase, where), freed in zip(seen["blocks"], seen["freed"], strict=True)
        if where.startswith(f"/job/train.py:{line} ")
    ]


def test_tensors_and_pinned_memory_are_known_with_line_and_phase(seen: dict[str, Any]) -> None:
    assert blocks_at(seen, 4) == [("pageable", 6, "init", False)]
    assert blocks_at(seen, 9) == [("pageable", 8, "other", True)]  # 2048 x 1024 floats, of which nothing was written
    assert blocks_at(seen, 10) == [("pinned", 8, "other", False)]  # 5 MiB: torch rounds to powers of two
    assert blocks_at(seen, 15)[-1] == ("pageable", 7, "other", True)  # past the allocator that is set


def test_shared_memory_and_mapped_files_are_seen_when_it_is_looked_at(seen: dict[str, Any]) -> None:
    assert seen["shared"] == 3 * MIB
    assert seen["mapped"] == [["data", 9 * MIB]]


def test_a_checkpoints_bytes_are_those_of_its_files(seen: dict[str, Any]) -> None:
    (whole, of_whole, is_async), (parts, of_parts, are_async) = seen["saves"]
    assert (whole, is_async, parts, are_async) == ("torch.save", False, "torch.distributed.checkpoint.async_save", True)
    assert seen["files"][0] > 8 * MIB
    assert abs(of_whole - seen["files"][0]) < 4096
    assert abs(of_parts - seen["files"][1]) < 65536  # what else the process writes meanwhile counts, too
    assert ("pageable", 8, "save", True) in blocks_at(seen, 16)  # staged


def test_torchs_own_storage_is_back(seen: dict[str, Any]) -> None:
    assert "made" not in seen["back"]
