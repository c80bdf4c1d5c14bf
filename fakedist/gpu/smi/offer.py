"""Puts ``nvidia-smi`` first on the PATH of a rank with a virtual GPU."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from fakedist.errors import SetupError
from fakedist.gpu.driver.build import torch_build
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.native import cache_directory
from fakedist.gpu.smi.nvidia_smi import VARIABLE, Machine
from fakedist.options import Job
from fakedist.temporary import replacing

_PROGRAM = os.fspath(Path(__file__).with_name("__main__.py"))


def smi_environment(job: Job, calls: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with ``nvidia-smi`` first on the PATH if the GPU is virtual. SetupError if it cannot be written.

    The program appends its calls to the file ``calls``.
    """
    if job.device != "virtual":
        return dict(environment)
    spec = find_gpu(job.gpu)
    machine = Machine(
        name=spec.product,
        memory_bytes=job.gpu_memory_bytes or spec.memory_bytes,
        devices=job.gpus_per_node,
        compute_capability=".".join(map(str, spec.compute_capability)),
        sm_mhz=spec.clock_khz // 1000,
        memory_mhz=spec.memory_clock_khz // 1000,
        cuda=torch_build()[1],
        calls=os.fspath(calls.resolve()),
    )
    path = os.pathsep.join((os.fspath(ensure_smi().parent), environment.get("PATH", os.defpath)))
    return {**environment, "PATH": path, VARIABLE: machine.text()}


def ensure_smi() -> Path:
    """Path of the program for this interpreter and fakedist, in the cache. SetupError if it cannot be written."""
    # Without site-packages and PYTHONPATH it starts in 0.1 s, and no module of the script can shadow the library.
    text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(_PROGRAM)} "$@"\n'
    program = cache_directory() / f"nvidia-smi-{hashlib.sha256(text.encode()).hexdigest()[:16]}" / "nvidia-smi"
    if program.exists():
        return program
    try:
        program.parent.mkdir(exist_ok=True)
        with replacing(program) as fresh:
            fresh.write_text(text)
            fresh.chmod(0o755)
    except OSError as error:
        raise SetupError(
            f"{program} cannot be written: {error.strerror}", "free some disk space, or set FAKEDIST_CACHE"
        ) from error
    return program
