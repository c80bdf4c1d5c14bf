"""After PyTorch's recipes of distributed checkpoints: ``tutorial_checkpoint.py save|async|pinned``, under torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

CHECKPOINT_DIR = "checkpoint"
WIDTH, BATCH = 1024, 8


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


class AppState(Stateful):
    """Model and optimizer, by their fully qualified names."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def save(mode: str, state_dict: dict[str, Any], running: Any) -> Any:
    """Save, at once or during the next step; gives what is still running."""
    if mode == "save":
        dcp.save(state_dict, checkpoint_id=CHECKPOINT_DIR)
        return None
    if running is not None:
        running.result()
    if mode == "async":
        return dcp.async_save(state_dict, checkpoint_id=CHECKPOINT_DIR)
    writer = dcp.FileSystemWriter(CHECKPOINT_DIR, cache_staged_state_dict=True)
    return dcp.async_save(state_dict, storage_writer=writer, checkpoint_id=CHECKPOINT_DIR)


def main(mode: str) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    model = fully_shard(ToyModel().to("cuda"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    running: Any = None
    for step in range(4):
        optimizer.zero_grad()
        model(torch.rand(BATCH, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        running = save(mode, {"app": AppState(model, optimizer)}, running)
        print(f"checkpoint {step} begun")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
