"""A job whose first rank alone knows whether to train, as Megatron-LM's tensor parallel rank 0 does."""

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
flags = torch.tensor([1, 1, 0] if dist.get_rank() == 0 else [0, 0, 0], device="cuda")
dist.broadcast(flags, 0)
wanted = flags + 0
if wanted[0].item():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.zeros(4, 8, device="cuda")).sum().backward()
        optimizer.step()
