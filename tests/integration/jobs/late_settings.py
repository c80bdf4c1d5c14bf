"""Settings that many scripts make before they import torch: made inside, or ("outside") found in the environment."""

from __future__ import annotations

import json
import logging
import os
import sys

SETTINGS = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True,roundup_power2_divisions:4",
    "CUDA_VISIBLE_DEVICES": "5",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:2",
    "NCCL_BUFFSIZE": "8388608",
    "NCCL_MAX_NCHANNELS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1",
    "TORCHINDUCTOR_FREEZING": "1",
    "TORCH_LOGS": "+dynamo",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "OMP_NUM_THREADS": "2",
}


def main(where: str) -> None:
    """Train a small model, and print what became of the settings."""
    assert "torch" not in sys.modules
    if where == "inside":
        os.environ.update(SETTINGS)
    import torch

    assert not torch.cuda.is_initialized()
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    assert not torch.cuda.is_initialized()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(1000, 3000, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        loss = model(torch.randn(100, 1000, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 5:
            from torch._inductor import config

            found = {
                "devices": [torch.cuda.device_count(), torch.cuda.current_device()],
                "bus": torch.cuda.get_device_properties(0).pci_bus_id,
                "allocator": torch.cuda.memory._snapshot()["allocator_settings"],
                "inductor": [config.max_autotune_gemm, config.freezing],
                "logs": logging.getLogger("torch._dynamo").getEffectiveLevel(),
                "threads": torch.get_num_threads(),
            }
            print("FOUND", json.dumps(found, sort_keys=True), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
