"""Run a piece of Python on the virtual GPU in a process of its own; what it prints as JSON comes back.

The process forks from one that has imported torch, unless the test sets a variable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from tests.support.virtual_worker import run_python

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
    body = textwrap.dedent(body)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr, open(os.devnull) as stdin:
        files = stdin.fileno(), stdout.fileno(), stderr.fileno()
        if environment:
            code = _BEFORE.format(devices=devices, memory=memory_bytes, gpu=gpu, body=textwrap.indent(body, "    "))
            own = os.environ | {"PYTHONPATH": str(ROOT)} | environment
            status = subprocess.run(
                [sys.executable, "-c", code], env=own, stdin=stdin, stdout=stdout, stderr=stderr
            ).returncode
        else:
            status = run_python(body, gpu, devices, memory_bytes, files)
        stdout.seek(0)
        stderr.seek(0)
        printed = stdout.read().decode()
        assert status == 0, stderr.read().decode()
    line = next(line for line in printed.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert isinstance(found, dict)
    return found
