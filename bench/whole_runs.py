"""Whole profiles, from one tensor to 405B: seconds from start to report, CPU seconds and host memory.

python bench/whole_runs.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LLAMA = [str(ROOT / "examples" / "llama_fsdp2.py"), "--tp", "8", "--checkpoint", "full"]
ONE_TENSOR = "import torch; torch.ones(3, device='cuda')"
SMALL, LARGE, LARGEST = (["--world-size", str(size), "--rank", "0"] for size in (8, 1024, 16384))
#: Options and script of each.
RUNS = {
    "one tensor, no page": ([*SMALL, "--no-page"], ["one_tensor.py"]),
    "70B at world 1,024 (make demo)": (LARGE, [*LLAMA, "--model", "70b"]),
    "the same, no page": ([*LARGE, "--no-page"], [*LLAMA, "--model", "70b"]),
    "405B at world 16,384": (LARGEST, [*LLAMA, "--model", "405b"]),
}


def main() -> None:
    """Print one line a run; ``--only`` names the runs to make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run those whose name contains this")
    only = parser.parse_args().only
    for name, (options, script) in RUNS.items():
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "one_tensor.py").write_text(ONE_TENSOR)
            started = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "fakedist", "profile", *options, "--device", "virtual", "-o", "run", *script],
                cwd=directory,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            _, status, usage = os.wait4(process.pid, 0)  # it counts the processes that this one waited for, too
            process.returncode = os.waitstatus_to_exitcode(status)
            elapsed_s = time.perf_counter() - started
        cpu_s, host_gb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9
        told = f"{elapsed_s:6.1f} s {cpu_s:6.1f} s of CPU {host_gb:6.2f} GB of host memory, exit {process.returncode}"
        print(f"{name:<32} {told}", flush=True)


if __name__ == "__main__":
    main()
