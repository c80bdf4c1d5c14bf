"""Checks what works on this machine, and what to type to fix the rest. Does not import torch."""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fakedist.errors import SetupError
from fakedist.gpu.driver.build import driver_path, ensure_driver, torch_build
from fakedist.gpu.fast_path.build import FAST_PATH
from fakedist.gpu.native import find_c_compiler
from fakedist.launcher.machine import count_real_gpus, host_memory_bytes
from fakedist.launcher.nsight import find_nsys
from fakedist.units import format_bytes

State = Literal["ok", "missing", "optional"]


@dataclass(frozen=True)
class MachineCheck:
    """The result of one check; ``state`` is "ok", "missing" (something needs it) or "optional"."""

    name: str
    state: State
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings on one machine, and the devices that work on it ("cuda", "virtual")."""

    findings: tuple[MachineCheck, ...]
    devices: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """The diagnosis as plain values, for ``--json``."""
        return {"devices": list(self.devices), "findings": [vars(finding) for finding in self.findings]}


def diagnose() -> Diagnosis:
    """Check everything that ``fakedist profile`` needs. Builds the virtual GPU's driver if it is not built yet."""
    torch, gpu, driver = check_torch(), check_gpu(), check_driver()
    devices = []
    if torch.state == "ok" and gpu.state == "ok":
        devices.append("cuda")
    if driver.state == "ok":
        devices.append("virtual")
    compiled = (check_compiler(driver), driver, check_fast_path())
    findings = (check_python(), torch, check_cuda(), gpu, *compiled, check_nsys(), check_memory())
    return Diagnosis(findings, tuple(devices))


def check_python() -> MachineCheck:
    """Check Python, which also runs the script."""
    return MachineCheck("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_torch() -> MachineCheck:
    """Check for a CUDA build of torch, which both devices need."""
    try:
        version, cuda = torch_build()
    except SetupError as error:
        return MachineCheck("torch", "missing", error.message, error.hint)
    if not cuda:
        return MachineCheck("torch", "missing", f"{version} is a CPU build", "pip install torch==2.15.0")
    return MachineCheck("torch", "ok", f"{version}, a CUDA build")


def check_cuda() -> MachineCheck:
    """Check the CUDA version that torch was built for."""
    try:
        cuda = torch_build()[1]
    except SetupError:
        return MachineCheck("CUDA", "missing", "comes with torch, which is not installed")
    if not cuda:
        return MachineCheck("CUDA", "missing", "this torch was built without CUDA", "install a CUDA build of torch")
    return MachineCheck("CUDA", "ok", f"{cuda}, which torch was built for")


def check_gpu() -> MachineCheck:
    """Check for a real GPU, for ``--device cuda``."""
    count = count_real_gpus()
    if not count:
        return MachineCheck("real GPU", "optional", "none found: runs use the virtual GPU", "")
    return MachineCheck("real GPU", "ok", f"{count} found; a run uses the first")


def check_compiler(driver: MachineCheck) -> MachineCheck:
    """Check for a C compiler, which builds the virtual GPU's driver once, unless the package has it."""
    compiler = _found("C compiler", find_c_compiler)
    if compiler.state == "ok" or driver.state != "ok":
        return compiler
    text = "not found: the virtual GPU works without one; torch.compile needs one for what Triton compiles"
    return dataclasses.replace(compiler, state="optional", text=text)


def check_driver() -> MachineCheck:
    """Check the virtual GPU's driver, and build it if it is not in the cache."""

    def build() -> str:
        path = driver_path()
        if path.exists():
            return f"built: {path}"
        start = time.monotonic()
        ensure_driver()
        return f"built now in {time.monotonic() - start:.1f} s: {path}"

    return _found("virtual GPU", build)


def check_fast_path() -> MachineCheck:
    """Check the compiled part of the recorder, and build it if it is not in the cache."""
    try:
        return MachineCheck("fast path", "ok", f"built: {FAST_PATH.ensure()}")
    except SetupError as error:
        text = f"not built, so recorded steps are slower, with the same results: {error.message.splitlines()[0]}"
        return MachineCheck("fast path", "optional", text, error.hint)


def check_nsys() -> MachineCheck:
    """Check for Nsight Systems, for ``--nsys`` and for existing reports."""
    try:
        return MachineCheck("nsys", "ok", f"{find_nsys()}: --nsys, fakedist nsys REPORT")
    except SetupError as error:
        return MachineCheck("nsys", "optional", "not found: only --nsys needs it", error.hint)


def check_memory() -> MachineCheck:
    """Check host memory. A large model's run on the virtual GPU takes a few GB of it."""
    return MachineCheck("host memory", "ok", format_bytes(host_memory_bytes()))


def _found(name: str, find: Callable[[], str]) -> MachineCheck:
    try:
        return MachineCheck(name, "ok", find())
    except SetupError as error:
        return MachineCheck(name, "missing", error.message, error.hint)
