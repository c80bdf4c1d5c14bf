"""The script's process is the script's: torch comes when it imports torch, CUDA when it asks for CUDA."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from fakedist.rundir.directory import read_journal
from fakedist.rundir.records import GpuRecord
from fakedist.rundir.table_rows import TABLES
from tests.conftest import ROOT, RunFakedist, clean_environment
from tests.integration.jobs.late_settings import SETTINGS
from tests.support.commands import COLD
from tests.support.runs import Finished

JOB = Path(__file__).parent / "jobs" / "late_settings.py"
#: What the clock says, in tables of a run.
CLOCK = ("time_us", "start_us", "wall_us", "wall_ms")
_TRAIN = """
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def table(run: Path, name: str) -> pd.DataFrame:
    """A table of a run without the clock's columns; streams, which are addresses, by number."""
    found = pd.read_parquet(run / "tables" / f"{name}.parquet")
    if "stream" in found:
        found["stream"] = pd.factorize(found["stream"])[0]
    return found.drop(columns=[column for column in CLOCK if column in found])


@pytest.mark.nightly
def test_what_a_script_sets_counts_as_if_it_were_set_outside(tmp_path: Path, run_fakedist: RunFakedist) -> None:
    rank = ("profile", "--world-size", "8", "--rank", "5")
    outside = [f"--env={name}={value}" for name, value in SETTINGS.items()]
    runs = {
        "inside": run_fakedist(*rank, "-o", tmp_path / "inside", JOB, "inside"),
        "outside": run_fakedist(*rank, *outside, "-o", tmp_path / "outside", JOB, "outside"),
    }
    told = {}
    for name, finished in runs.items():
        assert finished.code == 0, finished.stderr
        told[name] = [line for line in finished.stdout.splitlines() if line.startswith("FOUND ")]
    assert told["inside"] == told["outside"]
    found = json.loads(told["inside"][0].removeprefix("FOUND "))
    assert found["devices"] == [1, 0]
    assert found["bus"] == 6
    assert found["allocator"]["expandable_segments"] is True
    assert found["allocator"]["roundup_power2_divisions"]["1024"] == 4
    assert (found["inductor"], found["logs"]) == ([True, True], logging.DEBUG)
    for name in TABLES:
        pd.testing.assert_frame_equal(table(tmp_path / "inside", name), table(tmp_path / "outside", name), obj=name)
    manifests = [json.loads((tmp_path / name / "run.json").read_text()) for name in runs]
    assert len({json.dumps(each["notes"]) for each in manifests}) == 1
    assert not any("LOCAL_RANK" in note["text"] for note in manifests[0]["notes"])
    for key in ("estimated_outside", "advice", "by_category", "peak_reserved_bytes"):
        assert manifests[0]["summary"][key] == manifests[1]["summary"][key]
    records = read_journal(tmp_path / "inside" / "journal.bin")
    gpu = [record for record in records if isinstance(record, GpuRecord)][-1]
    assert (gpu.device_index, gpu.alloc_conf) == (0, SETTINGS["PYTORCH_ALLOC_CONF"])


def run_script(text: str, directory: Path, run_fakedist: RunFakedist) -> Finished:
    """Rank 3 of 8 of a script."""
    (directory / "script.py").write_text(text)
    return run_fakedist(
        "profile", "--world-size", "8", "--rank", "3", "-o", "run", "script.py", cwd=directory, env=COLD
    )


def test_torch_may_be_imported_first_in_a_thread(tmp_path: Path, run_fakedist: RunFakedist) -> None:
    text = (
        "import sys, threading\n"
        "assert 'torch' not in sys.modules\n"
        "thread = threading.Thread(target=__import__, args=('torch',))\n"
        "thread.start(); thread.join()\n"
        "import torch\n"
        "print('SUM', (3 * torch.ones(4, device='cuda')).sum().item())\n"
    )
    finished = run_script(text + _TRAIN, tmp_path, run_fakedist)
    assert (finished.code, finished.stdout.splitlines()[0]) == (0, "SUM 12.0"), finished.stderr
    assert "fits (2 steps recorded" in finished.stdout
    layers = table(tmp_path / "run", "layers").set_index("name")
    assert layers.at["(Linear)", "most_own_bytes"] > 32 << 20  # with its GEMMs' workspace: the main thread is recorded


def test_a_module_of_a_package_may_import_torch_distributed_first(tmp_path: Path, run_fakedist: RunFakedist) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    text = (
        "import os, sys\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "import torch.distributed as dist\n"
        "import torch\n"
        "torch.ones(3).sum().item(), torch.manual_seed(0)\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '6,3'  # CUDA has not been asked for anything\n"
        "dist.init_process_group('nccl')\n"
        "print('BEFORE', torch.cuda.device_count(), torch.cuda.is_initialized())\n"
        "made = torch.ops.aten.empty.memory_format([8], device='cuda')  # past torch.cuda\n"
        "print('AFTER', torch.cuda.device_count(), torch.cuda.is_initialized())\n"
        "print('BUS', torch.cuda.get_device_properties(1).pci_bus_id)\n"
        "import subprocess\n"
        "asked = ['nvidia-smi', '--query-gpu=uuid,memory.used', '--format=csv,noheader', '-i', '3']\n"
        "bare = {'PATH': os.environ['PATH']}\n"
        "told = subprocess.run(asked, env=bare, capture_output=True, text=True, check=True).stdout.split(', ')\n"
        "print('SMI', told[0] == f'GPU-{torch.cuda.get_device_properties(1).uuid}', told[1].strip())\n"
    )
    (package / "mod.py").write_text(text + _TRAIN)
    rank = ("profile", "--world-size", "8", "--rank", "3", "-o", "run", "-m", "pkg.mod")
    finished = run_fakedist(*rank, cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    printed = ["BEFORE 2 False", "AFTER 2 False", "BUS 4", "SMI True 0 MiB"]
    assert finished.stdout.splitlines()[:4] == printed, finished.stderr
    note = "nvidia-smi was called once: its answers are constants of an idle GPU with all memory free"
    told = json.loads((tmp_path / "run" / "run.json").read_text())["notes"]
    assert {"code": "smi_constant", "text": note} in told
    events = table(tmp_path / "run", "events")
    assert list(events["size_bytes"][:2]) == [2 << 20, 32]  # its segment and the tensor made past torch.cuda


def test_ranks_that_import_torch_by_themselves_and_workers_that_are_none(
    tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    text = (
        "import multiprocessing as mp, sys\n"
        "def count(queue):\n"
        "    import torch\n"
        "    queue.put(torch.ones(3).sum().item())\n"
        "def work(rank, world_size):\n"
        "    import torch, torch.distributed as dist\n"
        "    dist.init_process_group('nccl', rank=rank, world_size=world_size)\n"
        "    torch.cuda.set_device(rank)\n"
        "    print('RANK', rank, torch.ones(3, device='cuda').sum().item(), torch.cuda.current_device())\n"
        "if __name__ == '__main__':\n"
        "    for how in ('fork', 'spawn'):\n"
        "        context = mp.get_context(how)\n"
        "        queue = context.Queue()\n"
        "        child = context.Process(target=count, args=(queue,))\n"
        "        child.start(); print(how, queue.get()); child.join(); assert child.exitcode == 0\n"
        "    assert 'torch' not in sys.modules\n"
        "    ranks = [mp.get_context('spawn').Process(target=work, args=(rank, 8)) for rank in range(8)]\n"
        "    [each.start() for each in ranks]; [each.join() for each in ranks]\n"
    )
    finished = run_script(text, tmp_path, run_fakedist)
    assert finished.code == 0, finished.stderr
    assert finished.stdout.splitlines()[:3] == ["fork 3.0", "spawn 3.0", "RANK 3 3.0 3"]


def test_a_script_without_torch_ends_with_its_own_code(tmp_path: Path, run_fakedist: RunFakedist) -> None:
    finished = run_script("import fakedist; fakedist.step(); raise SystemExit(5)", tmp_path, run_fakedist)
    assert finished.code == 5, finished.stderr
    assert "- the script never imported torch: there is nothing to report" in finished.stdout
    assert "left the job during init" not in finished.stdout


@pytest.mark.parametrize("registered", ["", "import atexit; atexit.register(print, 'registered by the site')"])
def test_handlers_that_are_registered_before_ours_run(tmp_path: Path, registered: str) -> None:
    """Python imports ``sitecustomize`` first. Coverage of child processes begins there."""
    (tmp_path / "sitecustomize.py").write_text(registered)
    (tmp_path / "script.py").write_text(
        "import json\nclass Destroyed:\n    def __del__(self): print('taken down')\njson.held = Destroyed()\n"
    )
    environment = clean_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    rank = ("profile", "--world-size", "8", "--rank", "5", "--no-page", "-o", "run", "script.py")
    command = [sys.executable, "-m", "fakedist", *rank]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines.count("registered by the site") == (2 if registered else 0)  # in the command's own process, too
    assert "taken down" in lines  # what the script leaves is destroyed as in its own process


@pytest.mark.parametrize("swallows", ["except Exception: pass", "except: pass"])
def test_no_script_swallows_that_its_rank_cannot_be_set_up(
    swallows: str, tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "torch.py").write_text("nothing = 'of what torch has'\n")
    text = "import sys\nsys.path.insert(0, 'beside')\n"
    text += f"try:\n    import torch\n{swallows}\nopen('went_on', 'w')\n"
    finished = run_script(text, tmp_path, run_fakedist)
    assert finished.code == 1
    assert re.search(r"fakedist: error: \w+Error while torch was set up: .*torch", finished.stderr), finished.stderr
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "went_on").exists() == (swallows == "except: pass")


def test_an_allocator_without_history_is_refused_where_the_script_chose_it(
    tmp_path: Path, run_fakedist: RunFakedist
) -> None:
    text = (
        "import os\nos.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'\nimport torch\n"
        "try:\n    torch.ones(4).cuda()\nexcept Exception:\n    print('went on')\n"
    )
    finished = run_script(text, tmp_path, run_fakedist)
    assert (finished.code, finished.stdout) == (1, "")
    assert finished.stderr.startswith("fakedist: error: PYTORCH_NO_CUDA_MEMORY_CACHING switches the caching allocator")


_ASK = """
import ctypes, json, os, sys
from fakedist.gpu.driver.build import ensure_driver
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
answers = {}
for text in json.load(sys.stdin):
    with virtual_gpu(find_gpu("h100-80g"), 8) as gpu:
        driver = ctypes.CDLL(os.fspath(ensure_driver()))
        count, nvml = ctypes.c_int(), ctypes.c_uint()
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        driver.cudaRuntimeGetVersion(ctypes.byref(count)), driver.nvmlDeviceGetCount_v2(ctypes.byref(nvml))
        assert gpu.visible() == []  # neither is a first question
        if text is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = text
        error = driver.cudaGetDeviceCount(ctypes.byref(count))
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"  # too late
        again = ctypes.c_int()
        driver.cuDeviceGetCount(ctypes.byref(again))
        assert (error, again.value, nvml.value) == (0 if count.value else 100, count.value, 8)
        assert driver.cudaSetDevice(count.value) != 0
        answers[str(text)] = gpu.visible()
        assert len(gpu.visible()) == count.value
assert "torch" not in sys.modules
print(json.dumps(answers))
"""
_UUID = "GPU-66616b65-6469-7374-2076-697274756133"


def test_the_driver_reads_the_visible_devices_as_cuda_does_at_the_first_call() -> None:
    expected = {
        None: [0, 1, 2, 3, 4, 5, 6, 7],
        "": [],
        "5": [5],
        "3,1": [3, 1],
        "1, 2,8,3": [1, 2],  # there is no device 8
        "2,-1,3": [2],
        "2,2": [],
        "none": [],
        "1gpu2,2ampere": [1, 2],
        _UUID: [3],
        _UUID.lower(): [3],
        f"0,{_UUID[:40]}": [0, 3],
        "GPU-666": [],  # the beginning of all
        "GPU-0000": [],
    }
    asked = subprocess.run(
        [sys.executable, "-c", _ASK],
        input=json.dumps(list(expected)),
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
    )
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == {str(text): devices for text, devices in expected.items()}


_BARRIER = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl")
dist.barrier()
print("FOUND", torch.cuda.is_initialized())
init_device_mesh("cuda", (8,))
print("FOUND", torch.cuda.current_device())
"""


def test_a_barrier_leaves_torch_cuda_to_the_script(tmp_path: Path, run_fakedist: RunFakedist) -> None:
    (tmp_path / "barrier.py").write_text(_BARRIER)
    finished = run_fakedist("profile", "--world-size", "8", "--rank", "4", "barrier.py", cwd=tmp_path)
    assert finished.code == 0, finished.stderr
    assert [line for line in finished.stdout.splitlines() if line.startswith("FOUND")] == ["FOUND False", "FOUND 4"]
