"""Work before any optimizer exists, as public scripts do it: none of it is a training step.

- a backward as the first line, which warms up CUDA (modded-nanogpt);
- a probe of shapes on the CPU, in a constructor (Ultralytics);
- a forward and a backward of another model of the same class that stays (a count of FLOPs).

With the argument "ddp", the model that trains is wrapped after its probe.
"""

import sys

import torch
from torch import nn

WIDTH = 1024


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self(torch.zeros(1, WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(self.up(inputs).relu())
        return down


torch.empty(1, device="cuda", requires_grad=True).backward()
probe = Model().cuda()
probe(torch.randn(4, WIDTH, device="cuda")).sum().backward()
loaded = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # after the probe, in no step
model: nn.Module = Model().cuda()
if "ddp" in sys.argv:
    torch.distributed.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
for number in range(3):
    print("ITERATION", number, flush=True)
    model(torch.randn(64, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
