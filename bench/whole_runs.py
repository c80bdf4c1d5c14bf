"""Whole profiles of the two largest jobs: seconds from start to report, and host memory.

python bench/whole_runs.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LLAMA = ROOT / "examples" / "llama_fsdp2.py"
RUNS = {
    "70B at world 1,024 (make demo)": (["--world-size", "1024", "--rank", "0"], ["--model", "70b"]),
    "405B at world 16,384": (["--world-size", "16384", "--rank", "0"], ["--model", "405b"]),
}


def main() -> None:
    """Print one line a run."""
    for name, (world, model) in RUNS.items():
        with tempfile.TemporaryDirectory() as directory:
            options = ["--device", "virtual", "--output", str(Path(directory) / "run")]
            script = [str(LLAMA), *model, "--tp", "8", "--checkpoint", "full"]
            started = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "fakedist", "profile", *world, *options, *script],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            elapsed_s = time.perf_counter() - started
        host_gb = usage.ru_maxrss * 1024 / 1e9
        print(f"{name:<32} {elapsed_s:6.1f} s {host_gb:6.2f} GB of host memory, exit {process.returncode}", flush=True)


if __name__ == "__main__":
    main()
