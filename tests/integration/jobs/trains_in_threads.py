"""Two threads that train at once, each its own model, and change places in the middle of anything."""

import sys
import threading

import torch
from torch import nn

NUM_STEPS = 12


def train(num_hidden: int) -> None:
    model = nn.Sequential(nn.Linear(64, num_hidden), nn.GELU(), nn.Linear(num_hidden, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(NUM_STEPS):
        model(torch.randn(32, 64, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=train, args=(num_hidden,)) for num_hidden in (128, 256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
