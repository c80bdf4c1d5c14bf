"""Run a piece of Python on the virtual GPU in a process of its own; what it prints as JSON comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_BEFORE = """
import json, sys
from fakedist.gpu.models.catalogue import find_gpu
from fakedist.gpu.virtual import virtual_gpu
with virtual_gpu(find_gpu("{gpu}"), {devices}, {memory}) as gpu:
    import torch
    found = {{}}
{body}
print("FOUND", json.dumps(found), flush=True)
# An autograd thread that starts while the interpreter ends aborts the process (it asks for the GIL).
import os; os._exit(0)
"""


def on_virtual_gpu(
    body: str, devices: int = 8, memory_bytes: int | None = None, gpu: str = "h100-80g", **environment: str
) -> dict[str, Any]:
    """Run ``body``, which fills the dict ``found``; ``torch`` and ``gpu`` are there.

    Args:
        body: Python.
        devices: Virtual GPUs.
        memory_bytes: Memory of each.
        gpu: Their model.
        environment: Variables to set.
    """
    body = textwrap.indent(textwrap.dedent(body), "    ")
    code = _BEFORE.format(devices=devices, memory=memory_bytes, gpu=gpu, body=body)
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert isinstance(found, dict)
    return found
