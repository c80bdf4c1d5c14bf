"""After PyTorch's "Writing distributed applications": data in parts, gradients averaged by hand, no DDP."""

from __future__ import annotations

import os
from math import ceil
from random import Random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, Subset


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """As many random pictures as MNIST has."""

    def __len__(self) -> int:
        return 60_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(1, 28, 28, generator=generator), index % 10


class Net(nn.Module):
    """The network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.view(-1, 320))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def partition_dataset() -> tuple[DataLoader[tuple[torch.Tensor, int]], int]:
    dataset, size = Digits(), dist.get_world_size()
    indexes = list(range(len(dataset)))
    Random(1234).shuffle(indexes)
    part = len(dataset) // size
    own = indexes[dist.get_rank() * part : (dist.get_rank() + 1) * part]
    return DataLoader(Subset(dataset, own), batch_size=128 // size, shuffle=True), 128 // size


def average_gradients(model: nn.Module) -> None:
    """One all_reduce a parameter."""
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(1234)
    train_set, bsz = partition_dataset()
    model = Net().cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    num_batches = ceil(len(train_set.dataset) / float(bsz))
    epoch_loss = 0.0
    for data, target in train_set:
        optimizer.zero_grad()
        output = model(data.cuda())
        loss = F.nll_loss(output, target.cuda())
        epoch_loss += loss.item()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    print("Rank ", dist.get_rank(), ", epoch 0: ", epoch_loss / num_batches)


if __name__ == "__main__":
    main()
