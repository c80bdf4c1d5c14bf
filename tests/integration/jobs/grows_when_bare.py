"""A model that asks for more than any GPU has once the recorded steps are over, as made-up sizes may."""

import sys

import torch

model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    model(torch.randn(8, 16, device="cuda")).sum().backward()
    if step >= int(sys.argv[1]):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    optimizer.step()
    optimizer.zero_grad()
