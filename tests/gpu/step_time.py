"""How long a step of a script takes without fakedist: the wall time of many steps, with nothing in between.

    python tests/gpu/step_time.py RESULT.json SCRIPT [ARGUMENT ...]

The script is one of one rank, which steps an optimizer for longer than this looks. The device is waited for before and
after each window of steps, not within.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

#: Steps that warm up, and each window; windows.
WARM_UP, WINDOW, NUM_WINDOWS = 10, 10, 5


class Windows:
    """Sees an optimizer step: writes the microseconds of a step in each window, and ends the process.

    Args:
        result: The file.
    """

    def __init__(self, result: Path) -> None:
        self._result = result
        self._optimizer: object = None
        self._ended = 0
        self._begun = 0.0
        self._rows: list[dict[str, float]] = []

    def __call__(self, optimizer: object, args: object, kwargs: object) -> None:
        """An optimizer has stepped."""
        import torch

        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._ended += 1
        if self._ended < WARM_UP or (self._ended - WARM_UP) % WINDOW:
            return
        waits_from = time.perf_counter()
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self._begun:
            each_us = 1e6 / WINDOW
            self._rows.append({"step_us": (now - self._begun) * each_us, "behind_us": (now - waits_from) * 1e6})
        if len(self._rows) == NUM_WINDOWS:
            self._result.write_text(json.dumps(self._rows))
            os._exit(0)
        self._begun = time.perf_counter()


def main() -> None:
    result, script, *arguments = sys.argv[1:]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": str(20_000 + os.getpid() % 20_000)})
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Windows(Path(result)))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    raise SystemExit(f"{script} ended before {WARM_UP + NUM_WINDOWS * WINDOW} steps")


if __name__ == "__main__":
    main()
