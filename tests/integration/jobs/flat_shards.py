"""Parameters in one flat buffer, gathered before each forward from a shard in bfloat16, as sharding frameworks do.

Another shard, a copy in bfloat16 of float32 weights, is made for one gather alone.
"""

import torch
import torch.distributed as dist
from torch import nn


def gather_into(model: nn.Module, shard: torch.Tensor) -> None:
    """Gather the whole and let the model's parameters be views of it."""
    whole = torch.empty(shard.numel() * dist.get_world_size(), dtype=shard.dtype, device="cuda")
    dist.all_gather_into_tensor(whole, shard)
    for parameter, flat in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data = flat.view(parameter.shape)


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    model = nn.ModuleDict({"first": nn.Linear(256, 128), "second": nn.Linear(128, 256)}).bfloat16().cuda()
    copied = nn.ModuleDict({"third": nn.Linear(256, 256)}).bfloat16().cuda()
    num_elements = sum(p.numel() for p in model.parameters())
    shard = torch.zeros(num_elements // dist.get_world_size(), dtype=torch.bfloat16, device="cuda")
    masters = [
        nn.Parameter(shard.float()),
        nn.Parameter(torch.zeros(257 * 256 // dist.get_world_size(), device="cuda")),
    ]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for _ in range(3):
        x = torch.ones(8, 256, dtype=torch.bfloat16, device="cuda")
        gather_into(model, shard)
        hidden = model["second"](model["first"](x))
        gather_into(copied, masters[1].bfloat16())
        copied["third"](hidden).sum().backward()
        for master in masters:
            master.grad = torch.ones_like(master)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
