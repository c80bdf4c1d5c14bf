"""A step whose host takes batches, makes garbage, and waits for a device, an event and a stream."""

import torch
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
event, stream = torch.cuda.Event(), torch.cuda.current_stream()
for batch in DataLoader(torch.randn(400, 8, 16), batch_size=1):
    for _ in range(20_000):
        cycle = []
        cycle.append(cycle)
    loss = model(batch[0].cuda().repeat(512, 256)).square().mean()
    torch.cuda.synchronize()  # device
    loss.backward()
    event.record()
    event.synchronize()  # event
    optimizer.step()
    stream.synchronize()  # stream
    optimizer.zero_grad()
