"""A job of three processes of gloo that hangs in its last call; each writes torch's own dump of its calls."""

import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    rank, values = dist.get_rank(), torch.ones(4)
    pair = dist.new_group([0, 1])
    dist.all_reduce(values)
    if rank < 2:
        dist.broadcast(torch.ones(3), 0, group=pair)
    with suppress(RuntimeError):
        if kind == "operation" and rank == 2:
            dist.all_gather([torch.ones(4) for _ in range(3)], values)
        elif kind == "operation" or rank < 2:
            dist.all_reduce(torch.ones(8))
    folder.joinpath(f"trace_{rank}").write_bytes(c10d._dump_fr_trace())
    folder.joinpath(f"json_{rank}").write_bytes(c10d._dump_fr_trace_json())
