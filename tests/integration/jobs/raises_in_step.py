"""Raise in a step, the one that the first argument says. Later steps than the recorded ones are bare."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 40):
    loss = model(torch.randn(8, 16, device="cuda")).square().mean()
    if step >= int(sys.argv[1]):
        raise ValueError("the loss of this step is broken")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
