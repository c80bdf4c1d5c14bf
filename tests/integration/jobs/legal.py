"""Programs that are legal in PyTorch and unlike most training jobs. Each must run to its end."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, hessian, stack_module_state, vmap

WIDTH = 256


def train(net, parameters, batch, steps=2, optimizer=torch.optim.SGD):
    stepper = optimizer(parameters, 1e-3)
    for _ in range(steps):
        net(batch()).sum().backward()
        stepper.step()
        stepper.zero_grad()
    return stepper


class Values(nn.Module):
    """Apply the layers to each row of a nested tensor."""

    def __init__(self, first):
        super().__init__()
        self.parts = nn.Sequential(first, nn.Linear(64, 8))

    def forward(self, rows):
        return self.parts(rows).values()


def train_nested():
    def jagged(make):
        return torch.nested.nested_tensor([make(each) for each in (3, 5, 9)], layout=torch.jagged, device="cuda")

    words, parts = Values(nn.Embedding(100, 64)).cuda(), Values(nn.Linear(WIDTH, 64)).cuda()
    train(words, words.parameters(), lambda: jagged(lambda length: torch.randint(0, 100, (length,))))
    train(parts, parts.parameters(), lambda: jagged(lambda length: torch.randn(length, WIDTH)))


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)

    def rows():
        return torch.randn(4, WIDTH, device="cuda")

    class Recommender(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.EmbeddingBag(50_000, 64, mode="sum", sparse=True)

        def forward(self, places):
            return self.table(places, torch.arange(0, len(places), 10, device="cuda"))

    net = Recommender().cuda()
    kept = train(
        net,
        net.parameters(),
        lambda: torch.randint(0, 50_000, (1000,), device="cuda"),
        optimizer=torch.optim.SparseAdam,
    )
    lazy = nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU(), nn.LazyLinear(8)).cuda()
    nn.LazyLinear(3).cuda()  # never runs
    lazy(rows())
    train(lazy, lazy.parameters(), rows)
    train_nested()
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).cuda()
    for compiled in (torch.jit.trace(plain, rows()), torch.jit.script(plain)):
        train(compiled, compiled.parameters(), rows, steps=3)
    hessian(lambda x: (x**3).sum())(torch.randn(3, device="cuda"))
    parameters, buffers = stack_module_state([nn.Linear(8, 8).cuda() for _ in range(3)])
    one = nn.Linear(8, 8).cuda()
    batch = torch.randn(4, 8, device="cuda")
    vmap(lambda p, b, x: functional_call(one, (p, b), (x,)), in_dims=(0, 0, None))(parameters, buffers, batch)
    torch.quantize_per_tensor(rows(), 0.1, 0, torch.qint8).dequantize()
    sharded = fully_shard(nn.Linear(WIDTH, WIDTH).cuda())
    sharded.bfloat16()
    sharded(rows().bfloat16())
    sharded.float()
    torch.__future__.set_swap_module_params_on_conversion(True)
    swapped = nn.Linear(WIDTH, WIDTH).cuda()
    train(swapped, swapped.parameters(), rows)
    train(swapped.double(), swapped.parameters(), lambda: rows().double())
    import torch.distributed.rpc as rpc

    rpc.init_rpc("alone", rank=0, world_size=1)
    assert rpc.rpc_sync("alone", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    rpc.shutdown()
    print("the end", len(kept.state))


main()
