"""A Ray actor that has half of the rank's GPU: what the GPU has left before, with and after it."""

import json
import os
import time

import ray
import torch

GIB = 1 << 30


@ray.remote(num_gpus=0.5)
class Engine:
    def work(self) -> tuple[int, float, str]:
        """Hold 1 GiB; what is left, the sum of eight ones, and what fails."""
        self.kept = torch.ones(GIB // 4, device="cuda")
        try:
            torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=2)
            why = ""
        except RuntimeError as error:
            why = str(error)
        return torch.cuda.mem_get_info()[0], self.kept[:8].sum().item(), why


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def main() -> None:
    kept = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, object_store_memory=80 << 20)
    found = {"before": free()}
    engine = Engine.remote()
    found["with"], found["sum"], found["two"] = ray.get(engine.work.remote())
    ray.kill(engine)
    end = time.monotonic() + 30
    while free() != found["before"] and time.monotonic() < end:
        time.sleep(0.1)
    found["after"] = free()
    ray.shutdown()
    print("FOUND", json.dumps(found), kept.numel() and "", flush=True)


main()
