"""After PyG's examples/multi_gpu/distributed_batching.py: molecules of different sizes, GIN, batch norms, DDP.

Runs on GPUs too, under torchrun. Graphs are random: batches differ in their numbers of nodes and edges.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool

WIDTH, LAYERS, DROPOUT, BATCH, STEPS = 300, 3, 0.5, 256, 8


class GIN(nn.Module):
    """Three layers, as the example has them; atoms and bonds of one kind of property each."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.bonds = nn.Embedding(119, WIDTH), nn.Embedding(6, WIDTH)
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for _ in range(LAYERS):
            layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            self.convs.append(GINEConv(nn.Sequential(*layers), train_eps=True))
            self.norms.append(nn.BatchNorm1d(WIDTH))
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, graphs: Data) -> torch.Tensor:
        x, bonds = self.atoms(graphs.x), self.bonds(graphs.edge_attr)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(norm(conv(x, graphs.edge_index, bonds)).relu(), p=DROPOUT, training=self.training)
        return self.linear(global_mean_pool(x, graphs.batch))


def graph(seed: int) -> Data:
    """A random graph of 10 to 40 nodes."""
    generator = torch.Generator().manual_seed(seed)
    nodes = int(torch.randint(10, 41, (), generator=generator))
    edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
    return Data(
        x=torch.randint(0, 119, (nodes,), generator=generator),
        edge_index=edges,
        edge_attr=torch.randint(0, 6, (2 * nodes,), generator=generator),
        y=torch.rand(1, 1, generator=generator).round(),
    )


def main() -> None:
    """Train for an epoch."""
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    graphs = [graph(seed) for seed in range(BATCH * STEPS * dist.get_world_size())]
    loader = DataLoader(graphs, batch_size=BATCH, sampler=DistributedSampler(graphs))
    torch.manual_seed(12345)
    model = DistributedDataParallel(GIN().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    total = torch.zeros((), device="cuda")
    for batch in loader:
        moved = batch.to(f"cuda:{local_rank}")
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(moved), moved.y)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    print(f"loss: {total.item() / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
