"""The virtual GPU as PyTorch sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.virtual import on_virtual_gpu

GIB = 1 << 30

BASICS = """
found["available"] = torch.cuda.is_available()
found["count"] = torch.cuda.device_count()
properties = torch.cuda.get_device_properties(3)
found["name"], found["sms"], found["total"] = properties.name, properties.multi_processor_count, properties.total_memory
found["capability"] = torch.cuda.get_device_capability()
found["free_before"] = torch.cuda.mem_get_info(3)
first = torch.ones(3, device="cuda")
found["first"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
found["address"] = first.data_ptr()
torch.cuda.empty_cache()
other = torch.empty(3 << 20, device="cuda:3", dtype=torch.uint8)
found["free_after"] = torch.cuda.mem_get_info(3)
found["addresses"] = other.data_ptr()
a = torch.randn(1024, 1024, device="cuda:2", dtype=torch.bfloat16, requires_grad=True)
(a @ a).sum().backward()
found["devices"] = str(a.grad.device), str(other.device), torch.cuda.memory_allocated(1)
stream, event, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
event.record()
with torch.cuda.stream(stream):
    on_stream = torch.zeros(10, device="cuda")
    end.record()
stream.synchronize()
found["elapsed"] = event.elapsed_time(end) >= 0
found["streams"] = len({s["stream"] for s in torch.cuda.memory_snapshot()})
pinned = torch.arange(6.0).pin_memory()
found["pinned"] = pinned.is_pinned(), torch.ones(2).is_pinned()
found["round_trip"] = pinned.to("cuda", non_blocking=True).cpu().tolist()
big = torch.empty(8 * (1 << 30), dtype=torch.uint8, device="cuda")
big.fill_(1)
import resource
found["host_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
found["refused"] = gpu.refused()
found["launches"] = gpu.counters()["launches"]
"""


@pytest.fixture(scope="module")
def basics() -> dict[str, Any]:
    """Results of a process that uses the virtual GPU for the usual things."""
    found = on_virtual_gpu(BASICS)
    assert isinstance(found, dict)
    return found


def test_there_are_as_many_devices_as_asked_for_and_each_is_the_model_asked_for(basics: dict[str, Any]) -> None:
    assert basics["available"]
    assert basics["count"] == 8
    assert (basics["name"], basics["sms"], basics["capability"]) == ("NVIDIA H100 80GB HBM3", 132, [9, 0])


def test_the_first_tensor_takes_512_bytes_of_a_2_mib_segment(basics: dict[str, Any]) -> None:
    assert basics["first"] == [512, 2 << 20]


def test_each_device_counts_its_own_memory(basics: dict[str, Any]) -> None:
    free, total = basics["free_before"]
    assert free == total == basics["total"]
    assert free - basics["free_after"][0] == 20 << 20  # the segment that a tensor of 3 MiB is cut from
    assert basics["devices"] == ["cuda:2", "cuda:3", 0]


def test_streams_have_pools_of_their_own_and_events_have_times(basics: dict[str, Any]) -> None:
    assert basics["elapsed"]
    assert basics["streams"] == 2


def test_pinned_memory_is_told_from_other_host_memory(basics: dict[str, Any]) -> None:
    assert basics["pinned"] == [True, False]
    assert basics["round_trip"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_large_tensors_cost_the_host_nothing(basics: dict[str, Any]) -> None:
    assert basics["host_mib"] < 3000


def test_nothing_that_ordinary_training_needs_is_refused(basics: dict[str, Any]) -> None:
    assert basics["refused"] == []
    assert basics["launches"] > 0


@pytest.fixture(scope="module")
def first_matmul() -> dict[str, Any]:
    """Results of a process that multiplies at once."""
    return on_virtual_gpu(
        """
        found["address"] = torch.ones(3, device="cuda").data_ptr()
        matrix = torch.empty(16, 16, device="cuda", dtype=torch.bfloat16)
        product = matrix @ matrix
        found["reserved"] = torch.cuda.memory_reserved()
        found["taken"] = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
        """
    )


def test_addresses_are_the_same_in_every_run(basics: dict[str, Any], first_matmul: dict[str, Any]) -> None:
    assert first_matmul["address"] == basics["address"]


def test_the_first_matmul_reserves_the_workspace_of_a_hopper(first_matmul: dict[str, Any]) -> None:
    assert first_matmul["reserved"] == first_matmul["taken"] == 35_651_584  # 2 MiB of small pool, 32 MiB for cuBLAS


def test_running_out_of_memory_is_the_allocators_own_error() -> None:
    found = on_virtual_gpu(
        """
        held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            found["text"] = str(error)
        del held
        found["fits_now"] = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").numel()
        """,
        memory_bytes=4 * GIB,
    )
    assert (
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1024.00 MiB is free"
        in found["text"]
    )
    assert found["fits_now"] == 2 * GIB


def test_an_unanswered_function_is_refused_by_name() -> None:
    found = on_virtual_gpu(
        """
        import ctypes
        found["status"] = ctypes.CDLL("libcuda.so.1").cuTexRefCreate(None)
        found["refused"] = gpu.refused()
        """
    )
    assert found["status"] != 0
    assert found["refused"] == [["cuTexRefCreate", 1]]


@pytest.mark.nightly
def test_processes_that_build_the_driver_at_once_all_get_it(tmp_path: Path) -> None:
    code = "from fakedist.gpu.driver.build import ensure_driver; print(ensure_driver())"
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "FAKEDIST_CACHE": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    running = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    printed = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0, 0]
    assert len(printed) == 1
    built = [path for path in tmp_path.iterdir() if path.name != "build.lock"]
    assert [str(path / "libcuda.so.1") for path in built] == list(printed)


MONITOR = """
import ctypes
nvml, handle, value = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_uint()
both, most, same = (ctypes.c_uint * 2)(9, 9), ctypes.c_uint(), ctypes.c_void_p()
assert nvml.nvmlInit_v2() == nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(handle)) == 0
def read(name, *more):
    assert getattr(nvml, name)(handle, *more, ctypes.byref(value)) == 0
    return value.value
found["read"] = [read("nvmlDeviceGetPowerUsage"), read("nvmlDeviceGetTemperature", 0)]
found["read"].append(read("nvmlDeviceGetClockInfo", 1))
found["most"] = read("nvmlDeviceGetMaxClockInfo", 1)
assert nvml.nvmlDeviceGetUtilizationRates(handle, both) == 0
found["utilization"] = list(both)
name = ctypes.create_string_buffer(96)
assert nvml.nvmlDeviceGetUUID(handle, name, 96) == nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(same)) == 0
found["same"] = same.value == handle.value
held = torch.empty(1 << 28, device="cuda:2")
memory = (ctypes.c_ulonglong * 5)()
assert nvml.nvmlDeviceGetMemoryInfo_v2(handle, memory) == 0
found["used"] = memory[4]
processes, count = (ctypes.c_ulonglong * 3)(), ctypes.c_uint(1)
assert nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), processes) == 0
found["processes"] = [count.value, processes[0] == __import__("os").getpid(), processes[1]]
nvml.fakedist_constant.restype, calls, counted = ctypes.c_char_p, ctypes.c_uint64(), {}
while kind := nvml.fakedist_constant(len(counted), ctypes.byref(calls)):
    counted[kind.decode()] = calls.value
found["counted"] = counted
"""


def test_a_monitor_reads_an_idle_gpu_through_nvml_and_sensors_are_counted() -> None:
    found = on_virtual_gpu(MONITOR, devices=4)
    assert found["read"] == [70_000, 35, 345]
    assert found["most"] == 1980
    assert found["utilization"] == [0, 0]
    assert found["same"]
    assert found["used"] == GIB
    assert found["processes"] == [1, True, GIB]
    assert found["counted"] == {"power": 1, "temperature": 1, "clock": 1, "utilization": 1}
