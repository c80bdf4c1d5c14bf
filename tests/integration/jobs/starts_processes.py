"""A rank that holds memory of its GPU, and starts processes that use the GPU, too."""

import json
import multiprocessing
import socket
import subprocess
import sys

import torch

GIB = 1 << 30
_ALONE = """
import torch
tensor = torch.ones(GIB // 4, device="cuda")
print(torch.cuda.mem_get_info()[0], tensor[:8].sum().item())
""".replace("GIB", str(GIB))


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def work(answers: multiprocessing.Queue, over: multiprocessing.Event) -> None:
    """Hold 3 GiB, in a group of its own; ask for more than the GPU has; then for a group of two."""
    kept = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    with socket.create_server(("localhost", 0)) as server:
        address = f"tcp://localhost:{server.getsockname()[1]}"  # torchrun would keep the store of a rank
    torch.distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    tensor = torch.ones(4, device="cuda")
    torch.distributed.all_reduce(tensor)
    found = {"sum": tensor.sum().item(), "seen": free()}
    try:
        torch.empty(10 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["too much"] = str(error)
    torch.distributed.destroy_process_group()
    try:
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=2)
    except RuntimeError as error:
        found["two"] = str(error)
    answers.put(found)
    over.wait(60)
    del kept


def no_gpu(answers: multiprocessing.Queue) -> None:
    """As a DataLoader's worker."""
    answers.put([torch.ones(3).sum().item(), "fakedist.rank.surroundings" in sys.modules, "" in sys.path])


def from_server(answers: multiprocessing.Queue) -> None:
    """Started by a server of forks, which has imported torch."""
    tensor = torch.ones(GIB // 4, device="cuda")
    answers.put([free(), tensor[:8].sum().item()])


def main() -> None:
    context = multiprocessing.get_context("spawn")
    answers, over = context.Queue(), context.Event()
    kept = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    found = {"before": free()}
    process = context.Process(target=work, args=(answers, over))
    process.start()
    found |= answers.get(timeout=240)
    found["while it runs"] = free()
    over.set()
    process.join()
    found["after"], found["code"] = free(), process.exitcode
    process = context.Process(target=no_gpu, args=(answers,))
    process.start()
    found["no gpu"] = answers.get(timeout=240)
    process.join()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    answers = context.Queue()
    found["server"] = []
    for _ in range(2):
        process = context.Process(target=from_server, args=(answers,))
        process.start()
        found["server"].append(answers.get(timeout=240))
        process.join()
    found["after servers"] = free()
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, check=True)
    found["program"] = done.stdout.split()
    print("FOUND", json.dumps(found), kept.numel() and "", flush=True)


if __name__ == "__main__":
    main()
