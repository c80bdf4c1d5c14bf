"""Files that a fuzzer changed: no traceback, nothing run, no more read than there is. pytest's timeout ends a hang."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakedist.check.checking import Baseline, read_baseline
from fakedist.check.config import CheckConfig, CheckJob, read_config
from fakedist.cost_model.collectives.collective_times import read_fabric
from fakedist.gpu.models.catalogue import GPUS, read_gpu_file
from fakedist.options import Job
from fakedist.rundir.directory import read_journal
from fakedist.rundir.encoding import encode
from fakedist.rundir.tape import Awaited, GroupRecord, Guess, ScriptRecord, SentRecord, StoredRecord, Tape
from fakedist.sweep.plan import CommandLineSettings, sweep_of_file
from tests.hostile.damaging import damage
from tests.hostile.fuzzing import bounded, bounded_commands, bounded_growth, changed, damaged_bytes, reads, told
from tests.hostile.runs import records
from tests.support.real_files import real_file
from tests.unit.report.handmade import ranged, timed
from tests.unit.results.test_job_ranks import entry, p2p, write
from tests.unit.traces.nsys_made_up import PID, training
from tests.unit.traces.test_chrome_trace import Written, event
from tests.unit.traces.test_inferring import Made, inside

pytestmark = pytest.mark.timeout(60)  # for each test, where one hangs: all of them take a minute in sum


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a timed step."""
    return timed(tmp_path_factory.mktemp("fuzzed") / "run")


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose launches can be priced again."""
    return ranged(tmp_path_factory.mktemp("fuzzed") / "priced")


@pytest.fixture(scope="module")
def copy(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for copies of it."""
    return tmp_path_factory.mktemp("copies") / run.name


@pytest.fixture(autouse=True)
def nothing_is_run_and_little_is_taken(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    where = tmp_path_factory.mktemp("where")
    monkeypatch.chdir(where)
    with bounded_growth():
        yield
    assert not list(where.iterdir())


def again(run: Path, copy: Path) -> Path:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    (copy / "report.html").unlink(missing_ok=True)
    return copy


COMMANDS = st.sampled_from(
    [
        ["report"],
        ["report", "--format", "html"],
        ["report", "--format", "markdown"],
        ["report", "--section", "communication"],
        ["report", "--json"],
    ]
)


SHOWN = st.sampled_from([["report"], ["report", "--format", "html"], ["report", "--json"]])


@given(data=st.data())
@bounded
def test_run_json(run: Path, copy: Path, data: st.DataObject) -> None:
    path = again(run, copy) / "run.json"
    if data.draw(st.booleans()):
        path.write_text(json.dumps(data.draw(changed(json.loads(path.read_text())))))
    else:
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    told(copy, *data.draw(COMMANDS), str(copy))


@given(data=st.data())
@bounded
def test_columns_of_tables(run: Path, copy: Path, data: st.DataObject) -> None:
    paths = sorted((again(run, copy) / "tables").iterdir())
    damage(data.draw(st.sampled_from(paths)), data)
    told(copy, *data.draw(COMMANDS), str(copy))


@given(data=st.data())
@bounded
def test_columns_of_launches(priced: Path, copy: Path, data: st.DataObject) -> None:
    tables = again(priced, copy) / "tables"
    damage(tables / f"{data.draw(st.sampled_from(['launches', 'work', 'layers', 'groups', 'calls']))}.parquet", data)
    told(copy, "time", str(copy))


@given(data=st.data())
@bounded
def test_snapshots(run: Path, copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    path, whole = copy / "x.pickle", (run / "memory_snapshot.pickle").read_bytes()
    if data.draw(st.booleans()):
        found = pickle.loads(whole)
        found["device_traces"] = [trace[:20] for trace in found["device_traces"]]
        path.write_bytes(pickle.dumps(data.draw(changed(found)), data.draw(st.integers(2, 5))))
    else:
        path.write_bytes(data.draw(damaged_bytes(whole)))
    told(path, *data.draw(st.sampled_from([["report"], ["report", "--format", "html"]])), str(path))


@given(data=st.data())
@bounded
def test_journals(run: Path, copy: Path, data: st.DataObject) -> None:
    values = json.loads((again(run, copy) / "run.json").read_text())
    values.pop("summary")
    (copy / "run.json").write_text(json.dumps(values))
    path = copy / "journal.bin"
    if data.draw(st.booleans()):
        plain = [encode(record) for record in read_journal(path)]
        at = data.draw(st.integers(0, len(plain) - 1))
        plain[at] = data.draw(changed(plain[at]))
        path.write_bytes(records(*plain))
    else:
        path.write_bytes(data.draw(damaged_bytes(path.read_bytes())))
    told(copy, "report", str(copy))


def tape_records() -> list[dict[str, object]]:
    """One of each record of a tape."""
    channel = (("range", 0, 8, 1), 0)
    awaited = Awaited("broadcast_object_list", 0, channel, -1, None, 1)
    sent = SentRecord(0, -1, "broadcast", 1, 0, [("float32", (2,), b"12345678")], [b"x"])
    kept = (ScriptRecord("train.py", "/job/train.py", "ab"), GroupRecord(0, channel[0], 0), sent)
    return [
        encode(each) for each in (*kept, StoredRecord("key", b"value"), awaited, Guess(awaited, "x", "y", "z", True))
    ]


@given(data=st.data())
@bounded
def test_tapes(copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    path, plain = copy / "tape.bin", tape_records()
    at = data.draw(st.integers(0, len(plain) - 1))
    plain[at] = data.draw(changed(plain[at]))
    whole = records(*plain)
    path.write_bytes(whole if data.draw(st.booleans()) else data.draw(damaged_bytes(whole)))
    tape = Tape(copy, 0)
    awaited = Awaited("broadcast", 0, (("range", 0, 8, 1), 0), -1, None, 1)
    for read in (lambda: list(tape.sent_to(3)), tape.awaited, tape.guesses, tape.stored, tape.lost, tape.moved):
        reads(read, path)
    reads(lambda: tape.has(awaited, 3), path)


@given(data=st.data())
@bounded
def test_reports_of_nsight_systems(copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    report = training()
    report.kernels += [(*row[:-1], PID + (1 << 24)) for row in report.kernels]  # two processes
    report.waits, report.events = [(4000, 4200, 7, 90, 3, 0), (4300, 4400, 7, 92, 2, 5)], [(7, 91, 5)]
    path = report.write(copy / "report.sqlite")
    damage(path, data)
    if data.draw(st.booleans()):
        told(path, "nsys", "-o", str(copy / "run"), str(path))
    else:
        told(path, *data.draw(SHOWN), str(path))


def kineto() -> dict[str, object]:
    """A trace of torch.profiler with steps, modules, shapes, memory and a collective."""
    trace = Written()
    for number in (1, 2):
        start = trace.now
        trace.kernel("aten::mm", inside={"Input Dims": [[8, 4], [4, 2]], "Concrete Inputs": ["", ""]})
        trace.kernel("c10d::x", "ncclDevKernel_AllReduce", **{"Collective name": "allreduce", "Group size": 8})
        trace.frame("nn.Module: Linear_0", start - 1, trace.now)
        trace.events.append(event("user_annotation", f"ProfilerStep#{number}", start - 2, trace.now - start + 3))
    facts = {"Device Type": 1, "Device Id": 0, "Addr": 5, "Bytes": 512, "Total Allocated": 512, "Total Reserved": 1024}
    trace.events.append({**event("cpu_instant_event", "[memory]", 1000, 0, **facts), "ph": "i"})
    sync = {"cuda_sync_kind": "Stream Wait Event", "stream": 7, "device": 0, "correlation": 3, "wait_on_stream": 20}
    trace.events.append(event("cuda_sync", "x", 1030, 1, pid=0, wait_on_cuda_event_record_corr_id=2, **sync))
    properties = [{"id": 0, "name": "NVIDIA H100"}]
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 8, "ranks": [0, 1, 2, 3, 4, 5, 6, 7]}]
    distributed = {"backend": "nccl", "rank": 0, "world_size": 8, "pg_count": 1, "pg_config": groups}
    return {"deviceProperties": properties, "distributedInfo": distributed, "traceEvents": trace.events}


@given(data=st.data())
@bounded
def test_traces_of_the_profiler(copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    path = copy / "t.pt.trace.json"
    if data.draw(st.booleans()):
        path.write_text(json.dumps(data.draw(changed(kineto()))))
    else:
        whole = json.dumps(kineto()).encode()
        path.write_bytes(data.draw(damaged_bytes(gzip.compress(whole) if data.draw(st.booleans()) else whole)))
    told(path, *data.draw(SHOWN), str(path))


@given(data=st.data())
@bounded
def test_snapshots_of_which_much_is_inferred(copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    made = Made(native=data.draw(st.booleans()))
    made.before(4096)
    made.alloc(512, inside(("/job/model.py", 20, "forward")))
    made.step([4096])
    path, snapshot = copy / "x.pickle", made.snapshot()
    if data.draw(st.booleans()):  # of several devices, with what torch 2.1 did not write left out
        snapshot["device_traces"].append([dict(row) for row in snapshot["device_traces"][0]])
        for row in snapshot["device_traces"][0]:
            row.pop("time_us")
    value = data.draw(changed(data.draw(st.sampled_from([snapshot, snapshot["segments"]]))))
    written = data.draw(st.sampled_from([pickle.dumps, lambda value: json.dumps(value).encode()]))(value)
    path.write_bytes(gzip.compress(written) if data.draw(st.booleans()) else written)
    told(path, *data.draw(SHOWN), str(path))


def _part_of_a_trace(content: bytes) -> bytes:
    """The events until the fortieth kernel."""
    trace = json.loads(gzip.decompress(content), strict=False)
    events = [row for row in trace["traceEvents"] if isinstance(row.get("ts"), int | float)]
    until = sorted(row["ts"] for row in events if row.get("cat", "").lower() == "kernel")[40]
    return gzip.compress(json.dumps({**trace, "traceEvents": [row for row in events if row["ts"] <= until]}).encode())


def _part_of_a_snapshot(content: bytes) -> dict[str, Any]:
    """The beginning of the history, and of the segments."""
    snapshot: dict[str, Any] = pickle.loads(content)
    traces = [trace[:200] for trace in snapshot["device_traces"]]
    return {**snapshot, "device_traces": traces, "segments": snapshot["segments"][:5]}


REAL = [
    "v100-five-steps.pt.trace.json.gz", "rtx2080ti-resnet.pt.trace.json.gz", "course-gpt-medium-1024.pickle",
    "h100-2gpu-before.sqlite", "h100-2gpu-1s.sqlite",
]  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
@bounded_commands
def test_files_of_real_gpus(name: str, copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    path, content = copy / name, real_file(name).read_bytes()
    if path.suffix == ".pickle":
        part = _part_of_a_snapshot(content)
        part["device_traces"][0] = data.draw(changed(part["device_traces"][0]))
        path.write_bytes(pickle.dumps(part))
    else:
        path.write_bytes(_part_of_a_trace(content) if path.suffix == ".gz" else content)
        damage(path, data)
    told(path, *data.draw(SHOWN), str(path))


@given(data=st.data())
@bounded
def test_dumps_of_hung_ranks(copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    calls = [entry(1, "all_reduce"), entry(2, "broadcast"), p2p(1, "send 0->1", "started", group="5")]
    calls += [p2p(2, "recv 0<-1", "completed", group="5"), entry(2, "coalesced", group="5")]
    as_json = data.draw(st.booleans())
    good, bad = write(copy, {1: calls[:2], 0: calls}, as_json=as_json)
    whole = json.loads(bad.read_bytes()) if as_json else pickle.loads(bad.read_bytes())
    if data.draw(st.booleans()):
        damaged = data.draw(changed(whole))
        bad.write_bytes(json.dumps(damaged).encode() if as_json else pickle.dumps(damaged))
    else:
        bad.write_bytes(data.draw(damaged_bytes(bad.read_bytes())))
    told(bad, "match", str(good), str(bad))


@given(data=st.data())
@bounded
def test_baselines(copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    job = CheckJob("job", (Job(world_size=8, rank=0, target="train.py"),), (), ())
    config, path = CheckConfig(copy / "fakedist.toml", copy, (job,)), copy / "job.json"
    figures = {"peak_allocated_bytes": 5, "peak_reserved_bytes": 9, "capacity_bytes": 99, "by_category": {"other": 5}}
    plain = {"schema_version": 1, "settings": {"world_size": 8}, "ranks": {"0": figures}}
    whole = json.dumps(data.draw(changed(plain))).encode()
    path.write_bytes(whole if data.draw(st.booleans()) else data.draw(damaged_bytes(whole)))

    def read() -> Baseline | None:
        return read_baseline(config, job)

    reads(read, path)


TOMLS = {
    "fakedist.toml": '[check]\nmax_increase = "1%"\n[[check.jobs]]\nname = "a"\nscript = "t.py"\nworld_size = 8\n'
    'ranks = [0, 7]\ngpu_memory = "80GiB"\narguments = "--x 1"\nenv = { A = "1" }\n'
    'budgets = { peak_allocated = "7 GiB" }\n',
    "gpu.toml": 'like = "h100-80g"\nwatts = 500\nmemory = "90 GiB"\n[peak_tflops]\nbf16 = 900\n',
    "sweep.toml": 'script = "train.py"\narguments = "--tp {tp} --pp {pp}"\nworld_size = 64\nranks = "stages:5"\n'
    'keep = "none"\nheadroom = "8%"\ncontext = "600MiB"\ntokens_per_step = "4096 * pp"\nwhere = "tp * pp <= 8"\n'
    "[axes]\ntp = [1, 2, 4, 8]\npp = { from = 1, to = 8, factor = 2 }\n",
    "fabric.toml": 'like = "p5-efa"\nnic_gbit_per_s = 100\nachieved = 0.9\n',
}


@pytest.mark.parametrize("name", TOMLS)
@given(data=st.data())
@bounded
def test_toml(name: str, copy: Path, data: st.DataObject) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    path = copy / name
    path.write_text(TOMLS[name])
    damage(path, data)
    readers = {
        "fakedist.toml": lambda: read_config(path),
        "gpu.toml": lambda: asdict(read_gpu_file(path, GPUS)),
        "fabric.toml": lambda: asdict(read_fabric(path)),
        "sweep.toml": lambda: sweep_of_file(path, CommandLineSettings()),
    }
    reads(readers[name], path)
