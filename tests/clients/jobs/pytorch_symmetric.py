"""A product of matrices that gathers its input through symmetric memory while it computes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
name = dist.group.WORLD.group_name
enable_symm_mem_for_group(name)
matrix = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
print(torch.ops.symm_mem.fused_all_gather_matmul(matrix, [matrix], 0, name)[0].shape)
