"""Settings that a script makes before it imports torch, and that torch reads while it is imported and afterwards."""

import os
import sys

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
import torch

small = torch.empty(3 * 2**20, device="cuda")
segment = torch.cuda.memory_snapshot()[0]
print("SNAP", segment.get("is_expandable"), segment["total_size"], file=sys.stderr)
print("STATE", torch.cuda.device_count(), torch.cuda.memory_reserved(), torch.cuda.current_device(), file=sys.stderr)
