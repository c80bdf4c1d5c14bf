"""Run every rank of an example for real, on CPUs with gloo, and keep its gradients.

    python real_ranks.py SCRIPT WORLD_SIZE FOLDER FUNCTION [ARGS]...

The ranks are forked, so that torch is imported once. FUNCTION of the script gets a module first; whenever it returns,
the module's gradients are saved as FOLDER/rank<rank>.pt, {name: tensor}. What a rank prints goes to
FOLDER/rank<rank>.txt, its exit code is one line of stdout: "rank code".
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch


def run_rank(script: str, rank: int, folder: Path, function: str) -> int:
    spec = importlib.util.spec_from_file_location("example", script)
    assert spec is not None
    assert spec.loader is not None
    example = sys.modules["example"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    original = getattr(example, function)

    def keeping(module: torch.nn.Module, *args: Any) -> Any:
        result = original(module, *args)
        torch.save({name: each.grad.clone() for name, each in module.named_parameters()}, folder / f"rank{rank}.pt")
        return result

    setattr(example, function, keeping)
    try:
        example.main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    script, world_size, folder, function, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    os.environ |= {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["REAL_RANKS_PORT"]}
    children = {}
    for rank in range(int(world_size)):
        if (pid := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            said = os.open(Path(folder) / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            code = run_rank(script, rank, Path(folder), function)
            sys.stdout.flush()
            os._exit(code)
        children[pid] = rank
    for pid, rank in children.items():
        print(rank, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
