"""Call the driver's functions from a process of their own, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

from tests.conftest import ROOT

_BEFORE = """
import ctypes, json
from ctypes import byref, c_char, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NULL = c_void_p()
found = {{}}
with virtual_gpu(find_gpu("{gpu}"), {devices}, {memory}, {others}) as gpu:
    driver = ctypes.CDLL("libcuda.so.1")

    def make(function, *arguments):
        "What the function passes out first."
        out = c_void_p()
        status = getattr(driver, function)(byref(out), *arguments)
        return out.value if status == 0 else f"status {{status}}"

{body}
    print("FOUND", json.dumps(found))
"""


def on_driver(
    body: str, devices: int = 2, memory_bytes: int = 200 << 30, gpu: str = "h100-80g", others_bytes: int = 0
) -> dict[str, Any]:
    """Run ``body``, Python that fills the dict ``found``; ``driver``, ``gpu`` and ``make`` are defined.

    Each of the virtual GPUs has ``memory_bytes``, of which others hold ``others_bytes``.
    """
    indented = textwrap.indent(textwrap.dedent(body), "    ")
    finished = subprocess.run(
        [
            sys.executable,
            "-c",
            _BEFORE.format(gpu=gpu, devices=devices, memory=memory_bytes, others=others_bytes, body=indented),
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("FOUND "))
    facts = json.loads(line.removeprefix("FOUND "))
    assert isinstance(facts, dict)
    return facts
