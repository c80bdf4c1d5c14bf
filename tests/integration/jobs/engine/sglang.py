"""A stand-in for an engine's package, whose processes share layers: its name is what fakedist knows an engine by."""

import ctypes
import multiprocessing
import os

import torch
import torch.distributed as dist

MIB = 1 << 20


def used(device: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) // MIB


class Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("bytes", ctypes.c_char * 64)]


def handle_of(tensor: torch.Tensor) -> bytes:
    handle = Handle()
    assert not ctypes.CDLL(None).cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(tensor.data_ptr()))
    return ctypes.string_at(ctypes.byref(handle), 64)


def mapped(handle: bytes) -> list[int]:
    """MiB used of both GPUs before and after memory of the other process is mapped here."""
    before, address = [used(0), used(1)], ctypes.c_void_p()
    runtime = ctypes.CDLL(None)
    assert not runtime.cudaIpcOpenMemHandle(ctypes.byref(address), Handle.from_buffer_copy(handle), 1)
    after = [used(0), used(1)]
    assert not runtime.cudaIpcCloseMemHandle(address)
    return [*before, *after]


def work(rank: int, directory: str, answers: multiprocessing.Queue, over: multiprocessing.Event) -> None:
    """Hold 64 or 128 MiB of the rank's GPU, talk to the other rank over its host, and call it in a group for GPUs."""
    torch.cuda.set_device(rank)
    held = torch.zeros(64 * MIB * (1 + rank), dtype=torch.uint8, device="cuda")
    dist.init_process_group("nccl", init_method=f"file://{directory}/groups", rank=rank, world_size=2)
    hosts = dist.new_group(backend="gloo")
    on_host = torch.tensor([1.0 + rank])
    dist.all_reduce(on_host, group=hosts)
    on_gpu = torch.full((4,), 1.0 + rank, device="cuda")
    dist.all_reduce(on_gpu)
    objects, through_gpus, sent = [None, None], [None, None], [{"from": rank} if rank else None]
    dist.all_gather_object(objects, os.getpid(), group=hosts)
    dist.all_gather_object(through_gpus, os.getpid())
    dist.broadcast_object_list(sent, src=1)
    handles = [b"", b""]
    dist.all_gather_object(handles, handle_of(held), group=hosts)
    found = {
        "rank": rank,
        "hosts": on_host.item(),
        "gpus": on_gpu.tolist(),
        "objects": objects,
        "through gpus": through_gpus,
        "sent": sent,
        "mapped": mapped(handles[1 - rank]),
    }
    try:
        dist.new_group(backend="cpu:gloo,cuda:nccl")
    except RuntimeError as error:
        found["both"] = str(error)
    dist.barrier(group=hosts)
    answers.put(found)
    over.wait(60)
