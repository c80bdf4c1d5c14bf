"""Models that are moved, cast, loaded, copied and wrapped before training. Each way is a function, as lines show."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH = 1024


class Block(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Block(), Block()
        self.register_buffer("scale", torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        return self.down(self.up(x) @ self.scale.to(x.dtype))


class Packed(nn.Parameter):
    """Packed when it comes to a GPU, as bitsandbytes' Params4bit is."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)

    def cuda(self, device=None, non_blocking=False):
        return self.to(device="cuda")

    def to(self, *args, **kwargs):
        whole = self.data.to(*args, **kwargs)
        return Packed((whole * 2).to(torch.uint8))


class PackedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Packed(torch.ones(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x @ torch.Tensor.to(self.weight, torch.float32).t()


def moved():
    return Net().cuda()


def cast():
    return Net().cuda().half().float()


def materialized():
    with torch.device("meta"):
        net = Net()
    return net.to_empty(device="cuda")


def made_there():
    with torch.device("cuda"):
        return Net()


def loaded():
    net = Net().cuda()
    checkpoint = {}
    for name in net.state_dict():
        checkpoint[name] = torch.ones(WIDTH, WIDTH, device="cuda")
    net.load_state_dict(checkpoint)
    return net


def assigned():
    with torch.device("meta"):
        net = Net()
    checkpoint = {}
    for name in net.state_dict():
        checkpoint[name] = torch.ones(WIDTH, WIDTH, device="cuda")
    net.load_state_dict(checkpoint, assign=True)
    return net


def packed():
    return nn.Sequential(PackedLinear()).cuda()


def sharded():
    net = Net()
    for block in (net.up, net.down):
        fully_shard(block)
    return fully_shard(net)


def flattened():
    return FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sync_module_states=True,
        device_id=torch.cuda.current_device(),
    )


def flattened_on_device():
    return FullyShardedDataParallel(Net().cuda(), use_orig_params=True, sync_module_states=True)


def replicated():
    return nn.parallel.DistributedDataParallel(Net().cuda())


def averaged(net):
    return copy.deepcopy(net).requires_grad_(False)


WAYS = (moved, cast, materialized, made_there, loaded, assigned, packed, sharded, flattened, flattened_on_device)


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    nets = [way() for way in (*WAYS, replicated)]
    average = averaged(nets[0])
    peak = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)  # the peak is here
    del peak
    trained = [parameter for net in nets for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, foreach=False)
    for _ in range(3):
        for net in nets:
            loss = net(torch.ones(4, WIDTH, device="cuda", requires_grad=True)).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for mine, its in zip(average.parameters(), nets[0].parameters(), strict=True):
            mine.lerp_(its.detach(), 0.1)


if __name__ == "__main__":
    main()
