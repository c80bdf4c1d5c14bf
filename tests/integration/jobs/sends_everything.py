"""Every way to send something small, from every rank to every rank; prints it. The first rank exits with 3."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def collectives(rank: int, num_ranks: int, device: str) -> list[Any]:
    """Values that arrive by broadcasts, scatters and gathers."""
    got: list[Any] = []
    mine = torch.tensor([float(rank), 7.5], device=device)
    for root in range(num_ranks):
        tensor = mine.clone()
        dist.broadcast(tensor, root)
        got.append(tensor.tolist())
        part = torch.zeros(2, dtype=torch.int64, device=device)
        parts = [torch.tensor([root, each], device=device) for each in range(num_ranks)]
        dist.scatter(part, parts if rank == root else None, src=root)
        got.append(part.tolist())
        objects: list[Any] = [{"from": rank}, rank]
        dist.broadcast_object_list(objects, root)
        got.append(objects)
        one = ["stand-in"]
        dist.scatter_object_list(one, [f"{root}->{each}" for each in range(num_ranks)] if rank == root else None, root)
        got.append(one)
        slots: list[Any] = [None] * num_ranks
        dist.gather_object(("gathered", rank), slots if rank == root else None, dst=root)
        got.append(slots)
    dist.all_gather_object(slots, f"rank {rank}")
    got.append(slots)
    group = dist.new_group([0, 1])
    dist.broadcast(mine, 0, group=group)
    return [*got, mine.tolist()]


def neighbours(rank: int, num_ranks: int, device: str) -> list[Any]:
    """Values that arrive by sends, one rank up and one down."""
    got: list[Any] = []
    for number in range(2):
        if rank + 1 < num_ranks:
            dist.send(torch.tensor([rank, number], device=device), rank + 1)
        if rank:
            tensor = torch.zeros(2, dtype=torch.int64, device=device)
            dist.recv(tensor, rank - 1)
            got.append(tensor.tolist())
    if rank + 1 < num_ranks:
        dist.send_object_list(["up", rank], rank + 1)
        down = torch.zeros(1, device=device)
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, down, rank + 1)])[0].wait()
        got.append(down.tolist())
    if rank:
        objects: list[Any] = ["stand", "in"]
        got.append([dist.recv_object_list(objects, rank - 1), objects])
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.tensor([2.5 * rank], device=device), rank - 1)])[0].wait()
    return got


def main(device: str) -> None:
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank)
    got = collectives(rank, num_ranks, device) + neighbours(rank, num_ranks, device)
    sys.stdout.write(f"GOT {rank} {json.dumps(got)}\n")  # one piece: real ranks share the pipe
    dist.destroy_process_group()
    # torchrun ends the other ranks as soon as one has failed, with what they have not printed yet
    sys.exit(3 if rank == 0 and device == "cuda" else 0)


main(sys.argv[1])
