"""Distributed checkpoints: sharded parameters and optimizer states, saved and loaded, on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 64


def build(ranks: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model with a buffer that every rank has, and its optimizer."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    fully_shard(model[0], mesh=ranks)
    fully_shard(model, mesh=ranks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(directory: str) -> None:
    """Train, save, load into another model, train on."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ranks = init_device_mesh("cuda", (dist.get_world_size(),))
    model, optimizer = build(ranks)
    step(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "epoch": 7}, checkpoint_id=directory)
    files = sorted(path.name for path in Path(directory).iterdir())
    print("FILES", *files)
    kept = {name: weights[name].to_local().clone() for name in ("0.weight", "2.weight")}

    again, its_optimizer = build(ranks)
    step(again, its_optimizer)
    weights, states = get_state_dict(again, its_optimizer)
    loaded = {"model": weights, "optimizer": states, "epoch": 0}
    dcp.load(loaded, checkpoint_id=directory)
    set_state_dict(again, its_optimizer, model_state_dict=weights, optim_state_dict=states)
    same = [torch.equal(weights[name].to_local(), tensor) for name, tensor in kept.items()]
    print("LOADED", loaded["epoch"], *same)
    step(again, its_optimizer)
    dist.destroy_process_group()
    print("checkpoint done")


main(sys.argv[1])
