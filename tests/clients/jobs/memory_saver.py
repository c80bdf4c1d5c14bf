"""torch_memory_saver, in the mode that is the argument: what is held as weights and a KV cache sleep and wake."""

import json
import os
import subprocess
import sys

import torch
from torch_memory_saver import configure_subprocess
from torch_memory_saver import torch_memory_saver as saver

import fakedist

MIB = 1 << 20


def say(what: str, **more: float) -> None:
    free, total = torch.cuda.mem_get_info()
    held = {"used": total - free, "reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}
    print("HELD", json.dumps({"at": what, **held, **more}), flush=True)


def main() -> None:
    saver.hook_mode = sys.argv[1]
    others = torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")
    say("before")
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = [torch.full((size * MIB,), 3, dtype=torch.uint8, device="cuda") for size in (30, 7)]
    with saver.region(tag="cache"):
        cache = torch.zeros(1001 * MIB, dtype=torch.uint8, device="cuda")
    addresses = [tensor.data_ptr() for tensor in (*weights, cache)]
    say("filled")
    for tag in ("cache", "weights"):
        with fakedist.phase(f"{tag} asleep"):
            saver.pause(tag)
        say(f"{tag} asleep")
    for tag in ("weights", "cache"):
        saver.resume(tag)
        say(f"{tag} awake")
    same = addresses == [tensor.data_ptr() for tensor in (*weights, cache)]
    say("end", same=same, first=weights[1][:8].sum().item(), other=others[:8].sum().item())


def begin_with_the_hook() -> None:
    """The hook is linked with CUDA's libraries: a program that begins with it finds them by LD_LIBRARY_PATH."""
    libraries = os.pathsep.join(filter(None, (os.environ["TRITON_LIBCUDA_PATH"], os.environ.get("LD_LIBRARY_PATH"))))
    with configure_subprocess():
        subprocess.run([sys.executable, *sys.argv], check=True, env={**os.environ, "LD_LIBRARY_PATH": libraries})


if sys.argv[1] == "preload" and "LD_PRELOAD" not in os.environ:
    begin_with_the_hook()
else:
    main()
