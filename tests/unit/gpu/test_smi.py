"""``nvidia-smi`` of the virtual GPU, run as scripts run it: by its name, as another process."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fakedist.gpu.driver.build import SOURCE_DIRECTORY
from fakedist.gpu.smi import nvidia_smi
from fakedist.gpu.smi.nvidia_smi import VARIABLE, Gpu, Machine
from fakedist.gpu.smi.offer import ensure_smi, smi_environment
from fakedist.options import Job
from fakedist.rundir.smi_calls import calls_notes

MACHINE = Machine("NVIDIA H100 80GB HBM3", 84_942_979_072, 2, "9.0", 1980, 2619, "13.2", "")
UUIDS = [f"GPU-66616b65-6469-7374-2076-69727475613{number}" for number in (0, 1)]


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "nvidia-smi.log"


def smi(calls: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr; ``env`` instead of the machine's description."""
    described = {VARIABLE: dataclasses.replace(MACHINE, calls=str(calls)).text()}
    path = f"{ensure_smi().parent}{os.pathsep}{os.defpath}"
    done = subprocess.run(
        ["nvidia-smi", *arguments],
        env={"PATH": path, **(described if env is None else env)},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEDIST_CACHE", str(tmp_path / "cache of its own"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("-L",), [f"GPU {number}: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[number]})" for number in (0, 1)]),
        (("-L", "-i", UUIDS[1]), [f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[1]})"]),
        (
            ("--query-gpu=index,memory.total,compute_cap", "--format=csv"),
            ["index, memory.total [MiB], compute_cap", "0, 81007 MiB, 9.0", "1, 81007 MiB, 9.0"],
        ),
        (("-i", "0", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"), ["1980"]),  # triton.testing.nvsmi
        (("--query-gpu=count,gpu_name", "--format=csv,noheader", "--id=0"), ["2, NVIDIA H100 80GB HBM3"]),
        (("--query-gpu=driver_version", "--format=csv,noheader", "--id=00000000:02:00.0"), ["580.65.06"]),
    ],
)
def test_what_follows_from_the_gpus_model_is_told_and_not_counted(
    calls: Path, arguments: tuple[str, ...], expected: list[str]
) -> None:
    assert smi(calls, *arguments) == (0, expected, "")
    assert calls_notes(calls) == []


def test_a_monitors_query_is_answered_with_constants_and_counted(calls: Path) -> None:
    names = "utilization.gpu,memory.used,memory.free,fan.speed,temperature.gpu,power.draw,clocks.sm,clocks.mem,pstate"
    header = (
        "utilization.gpu [%], memory.used [MiB], memory.free [MiB], fan.speed [%], temperature.gpu, power.draw [W], "
        "clocks.current.sm [MHz], clocks.current.memory [MHz], pstate"
    )
    row = "0 %, 0 MiB, 81007 MiB, [N/A], 35, 70.00 W, 345 MHz, 2619 MHz, P0"
    assert smi(calls, "--query-gpu", names, "--format", "csv", "-i", "1") == (0, [header, row], "")
    bare = (0, ["0, 0, 81007, [N/A], 35, 70.00, 345, 2619, P0"] * 2, "")  # a unit does not belong to a number
    assert smi(calls, f"--query-gpu={names}", "--format=csv,nounits,noheader") == bare
    (note,) = calls_notes(calls)
    assert note.text == "nvidia-smi was called 2 times: its answers are constants of an idle GPU with all memory free"


def test_families_of_fields_are_known_and_there_is_no_process(calls: Path) -> None:
    names = {"ecc.errors.uncorrected.volatile.total": "0", "clocks_event_reasons.gpu_idle": "Active", "serial": "[N/A]"}
    asked = f"--query-gpu={','.join(names)}"
    assert smi(calls, asked, "--format=csv,noheader", "-i", "0") == (0, [", ".join(names.values())], "")
    header = ["pid, process_name, used_gpu_memory [MiB]"]
    assert smi(calls, "--query-compute-apps=pid,name,used_memory", "--format=csv") == (0, header, "")
    assert smi(calls, "--query-compute-apps=pid", "--format=csv,noheader") == (0, [], "")
    assert smi(calls, "--query-compute-apps=index", "--format=csv")[0] == 2


def test_the_table_shows_every_gpu_and_no_process(calls: Path) -> None:
    code, lines, stderr = smi(calls)
    assert (code, stderr) == (0, "")
    assert {len(line) for line in lines[1:] if line} == {91}
    assert "|   1  NVIDIA H100 80GB HBM3          On  |   00000000:02:00.0 Off |                    0 |" in lines
    assert "| N/A   35C    P0             70W /  700W |       0MiB /  81007MiB |      0%      Default |" in lines
    assert any("CUDA Version: 13.2" in line for line in lines)
    assert any("No running processes found" in line for line in lines)
    assert len(calls_notes(calls)) == 1


def test_a_field_that_does_not_exist_is_refused_as_by_the_real_tool(calls: Path) -> None:
    expected = (2, ['Field "memory.usd" is not a valid field to query.', ""], "")
    assert smi(calls, "--query-gpu=index,memory.usd", "--format=csv") == expected
    assert smi(calls, "--query-gpu=index")[0] == smi(calls, "--query-gpu=index", "--format=xml")[0] == 2
    assert smi(calls, "-i", "2") == (6, ["No devices were found"], "")
    (note,) = calls_notes(calls)  # a device that does not exist is an answer
    assert note.text == "nvidia-smi refused 3 calls, first nvidia-smi --query-gpu=index,memory.usd --format=csv"


@pytest.mark.parametrize(
    "arguments",
    [("-l", "1"), ("--loop=1",), ("topo", "-m"), ("dmon",), ("-pm", "1"), ("-q", "-x"), ("--version",), ("-L", "-q")],
)
def test_what_is_not_answered_is_refused_in_one_line_and_counted(calls: Path, arguments: tuple[str, ...]) -> None:
    refused = next(word for word in arguments if word != "-L").partition("=")[0]
    code, lines, said = smi(calls, *arguments)
    assert (code, lines, said.count("\n")) == (2, [], 1)
    assert said.startswith(f"nvidia-smi: {refused} is not supported on fakedist's virtual GPU; -L, -i, ")
    assert [note.text for note in calls_notes(calls)] == [
        f"nvidia-smi refused 1 call, first nvidia-smi {' '.join(arguments)}"
    ]


def test_a_call_that_cannot_be_counted_is_answered_all_the_same(tmp_path: Path) -> None:
    for calls in (tmp_path / "gone" / "calls", Path("/dev/full"), tmp_path):
        assert smi(calls, "--query-gpu=memory.used", "--format=csv,noheader")[:2] == (0, ["0 MiB", "0 MiB"])
        assert calls_notes(calls) == []


def test_a_script_may_clear_the_environment_but_for_the_path(calls: Path) -> None:
    code = "import os, subprocess; subprocess.run(['nvidia-smi', '-L'], env={'PATH': os.environ['PATH']}, check=True)"
    described = {VARIABLE: dataclasses.replace(MACHINE, calls=str(calls)).text()}
    environment = {"PATH": str(ensure_smi().parent), **described}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[0]})\n"), done.stderr
    code, lines, stderr = smi(calls, "-L", env={VARIABLE: ""})
    assert (code, len(lines)) == (9, 1)
    assert VARIABLE in stderr


def test_only_a_rank_with_a_virtual_gpu_finds_it(tmp_path: Path) -> None:
    job = Job(world_size=16, rank=9, target="train.py", gpu="a100-40g", gpus_per_node=4)
    found = smi_environment(job, tmp_path / "calls", {"PATH": "/usr/bin"})
    first, rest = found["PATH"].split(os.pathsep)
    assert (first, rest) == (str(ensure_smi().parent), "/usr/bin")
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"],
        env=found,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["NVIDIA A100-SXM4-40GB, 40339 MiB"] * 4
    outside = {"PATH": "/usr/bin"}
    assert smi_environment(dataclasses.replace(job, device="cuda"), tmp_path, outside) == outside


def test_constants_are_those_of_nvml() -> None:
    source = (SOURCE_DIRECTORY / "nvml_sensors.c").read_text()
    for name in ("IDLE_MILLIWATTS", "LIMIT_MILLIWATTS", "IDLE_CELSIUS", "IDLE_MHZ", "REASON_IDLE"):
        assert re.findall(rf"\b{name} = (\d+)", source) == [str(getattr(nvidia_smi, name))]
    told = Gpu(MACHINE, 0).constants()
    for function, name in (("CurrPcieLinkWidth", "width.current"), ("CurrPcieLinkGeneration", "gen.current")):
        (value,) = re.findall(rf"nvmlDeviceGet{function}\(.*, (\d+)\);", source)
        assert int(value) == told[f"pcie.link.{name}"][0]
    versions = re.findall(r'"(\d+\.\d+\.\d+)"', (SOURCE_DIRECTORY / "nvml.c").read_text())
    assert versions == [dataclasses.replace(MACHINE, cuda=cuda).driver for cuda in ("13.2", "12.8")]
