"""torch.profiler in a script: the virtual GPU's CUPTI tells it what was launched, the run whose times those are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist
from tests.support.virtual import on_virtual_gpu

_SCRIPT = """
import json

import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.randn(2048, 1024, device="cuda")

def ready(profiler):
    profiler.export_chrome_trace("trace.json")
    names = {each.key: each.count for each in profiler.key_averages() if each.self_device_time_total > 0}
    with open("averages.json", "w") as file:
        json.dump(names, file)

activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=2), on_trace_ready=ready) as profiler:
    for _ in range(4):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory, run_fakedist: RunFakedist) -> tuple[Any, dict[str, int], str]:
    """The script's trace, its averages, and what the run notes."""
    directory: Path = tmp_path_factory.mktemp("profiler")
    (directory / "train.py").write_text(_SCRIPT)
    options = ("--world-size", "8", "--rank", "0", "--device", "virtual", "--steps", "4", "-o", directory / "run")
    summary = run_fakedist("profile", *options, "--json", "train.py", cwd=directory).json()
    trace, averages = (json.loads((directory / f"{name}.json").read_text()) for name in ("trace", "averages"))
    return trace["traceEvents"], averages, "\n".join(note["text"] for note in summary["notes"])


def test_a_script_sees_its_kernels_in_key_averages(profiled: tuple[Any, dict[str, int], str]) -> None:
    _, averages, _ = profiled
    assert averages["aten::addmm"] == 2 * 3  # two steps, three layers
    assert any(name.startswith("void at::native::") for name in averages)
    assert any("FusedAdam" in name for name in averages)


def test_every_kernel_of_its_trace_has_a_call_and_comes_after_it(profiled: tuple[Any, dict[str, int], str]) -> None:
    events, _, _ = profiled
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    calls = {
        event["args"]["correlation"]: event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    assert len(kernels) > 2 * 3 * 3
    assert all(event["dur"] == pytest.approx(1.0, abs=0.01) for event in kernels)
    assert all(calls[event["args"]["correlation"]]["ts"] <= event["ts"] for event in kernels)
    assert all(event["args"]["device"] == 0 for event in kernels)


def test_the_run_says_that_these_are_the_times_of_no_gpu(profiled: tuple[Any, dict[str, int], str]) -> None:
    _, _, notes = profiled
    assert "the script's profiler saw " in notes
    assert "their times are not a GPU's (each takes 1 µs)" in notes


_STREAMS = """
from torch.profiler import ProfilerActivity, profile
from torch._C._profiler import _ExperimentalConfig

x = torch.randn(1 << 20, device="cuda")
side = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = (x * 2).add_(1)
config = _ExperimentalConfig(enable_cuda_sync_events=True)
activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
with profile(activities=activities, acc_events=True, experimental_config=config) as profiler:
    for _ in range(50):
        x.mul_(2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    graph.replay()
    host = x[:4].cpu()
    torch.cuda.synchronize()
events = profiler.profiler.kineto_results.events()
on_gpu = [event for event in events if event.device_type() == torch._C._autograd.DeviceType.CUDA]
found["gpu"] = [
    [event.name()[:40], event.device_resource_id(), event.start_ns(), event.duration_ns(), event.correlation_id()]
    for event in on_gpu
]
found["calls"] = {
    event.correlation_id(): event.name() for event in events if event.name().startswith(("cu", "__cu", "INVALID"))
}
found["traced"], found["refused"] = gpu.traced(), gpu.refused()
x.mul_(2)
found["traced_later"] = gpu.traced()
"""


@pytest.fixture(scope="module")
def streams() -> dict[str, Any]:
    return on_virtual_gpu(_STREAMS)


def test_work_that_waits_for_an_event_begins_after_it(streams: dict[str, Any]) -> None:
    kernels = [each for each in streams["gpu"] if each[0].startswith("void")]
    first, side = kernels[:50], next(each for each in kernels if each[1] != kernels[0][1])
    assert len({each[1] for each in first}) == 1
    assert side[2] >= max(start + duration for _, _, start, duration, _ in first) - 2


def test_waits_and_copies_are_told(streams: dict[str, Any]) -> None:
    names = [each[0] for each in streams["gpu"]]
    assert {"Stream Wait Event", "Stream Sync", "Context Sync", "Memcpy DtoH (Device -> Pageable)"} <= set(names)
    assert streams["refused"] == []


def test_all_kernels_of_a_graph_have_the_call_that_launched_it(streams: dict[str, Any]) -> None:
    launch = next(number for number, name in streams["calls"].items() if name == "cudaGraphLaunch")
    assert sum(str(each[4]) == launch for each in streams["gpu"]) == 2


def test_only_what_was_asked_for_is_traced(streams: dict[str, Any]) -> None:
    assert streams["traced"] == 50 + 1 + 2 + 1
    assert streams["traced_later"] == streams["traced"]
