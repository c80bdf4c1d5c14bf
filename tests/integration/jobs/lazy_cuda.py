"""When CUDA is initialised, from ``import torch`` to a device mesh."""

import importlib
import os
import sys

import torch
import torch.distributed as dist


def state(where: str) -> None:
    """Print whether CUDA is initialised."""
    print("STATE", where, torch.cuda.is_initialized(), file=sys.stderr, flush=True)


state("start")
torch.accelerator.is_available()
torch.accelerator.device_count()
state("accelerator")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=device)
state("process group")
importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cuda", (8,))
state("mesh")
print("STATE", torch.cuda.current_device(), file=sys.stderr)
