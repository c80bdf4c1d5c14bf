"""Collectives in code that training scripts compile; each part says "ok" or why not."""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
WORLD = dist.get_world_size()
MESH = init_device_mesh("cuda", (WORLD,))
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).cuda()


def gradients() -> torch.Tensor:
    return torch.ones(8 * WORLD, 64, device="cuda")


def asynchronous() -> None:
    @torch.compile
    def scatter_and_wait(grad: torch.Tensor) -> torch.Tensor:
        part = torch.empty_like(grad[: grad.shape[0] // WORLD])
        future = reduce_scatter(part, grad, op=dist.ReduceOp.AVG, async_op=True).get_future()
        future.wait()
        return part * 2

    assert scatter_and_wait(gradients()).shape == (8, 64)


def given_group() -> None:
    @torch.compile
    def gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        dist.all_reduce(part, group=group)
        whole = part.new_empty(part.shape[0] * WORLD, 64)
        work = all_gather(whole, part, group=group, async_op=True)
        assert work.is_completed()
        work.wait()
        return whole + 1

    assert gather(gradients(), dist.new_group(list(range(WORLD)))).shape == (8 * WORLD * WORLD, 64)


def optimizer_with_collectives() -> None:
    """As Muon and DistAdam of the nanoGPT speedruns: a compiled update between asynchronous collectives."""

    class Sharded(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.compile
        @torch.no_grad()
        def step(self) -> None:
            reduced, parts, gathered = [], [], []
            for parameter in self.param_groups[0]["params"]:
                part = torch.empty_like(parameter.grad[: parameter.shape[0] // WORLD])
                work = reduce_scatter(part, parameter.grad, op=dist.ReduceOp.AVG, async_op=True)
                reduced.append(work.get_future())
                parts.append(part)
            for i, parameter in enumerate(self.param_groups[0]["params"]):
                reduced[i].wait()
                rows = parameter.shape[0] // WORLD
                part = parameter[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]
                part.add_(parts[i], alpha=-0.1)
                gathered.append(all_gather(parameter, part, async_op=True).get_future())
            torch.futures.collect_all(gathered).wait()

    net = model()
    optimizer = Sharded(list(net[0].parameters()))
    for _ in range(2):
        net(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()


def whole_step() -> None:
    net = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters())

    @torch.compile
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        return loss.detach()

    for _ in range(2):
        step(torch.ones(4, 64, device="cuda"))


def compiled_optimizer() -> None:
    net = fully_shard(model())
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4, 64, device="cuda")).sum().backward()
    torch.compile(optimizer.step)()


def sharded_model() -> None:
    net = torch.compile(fully_shard(model()))
    net(torch.ones(4, 64, device="cuda")).sum().backward()


def tensor_parallel() -> None:
    net = parallelize_module(model(), MESH, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    compiled = torch.compile(net, fullgraph=True)
    compiled(torch.ones(4, 64, device="cuda")).sum().backward()


def functional(part: torch.Tensor) -> torch.Tensor:
    whole = funcol.all_gather_tensor(funcol.all_reduce(part, "sum", dist.group.WORLD) * 2, 0, dist.group.WORLD)
    return funcol.reduce_scatter_tensor(whole, "avg", 0, dist.group.WORLD) + 1


def one_graph() -> None:
    assert torch.compile(functional, fullgraph=True)(gradients()).shape == (8 * WORLD, 64)


def in_place(part: torch.Tensor) -> torch.Tensor:
    summed = part * 2
    dist.all_reduce(summed)
    return summed + 1


def one_graph_of_calls() -> None:
    assert torch.compile(in_place, fullgraph=True)(gradients()).shape == (8 * WORLD, 64)


def traced() -> None:
    for mode in ("real", "fake", "symbolic"):
        for function, wanted in ((functional, 3), (in_place, 1)):
            graph = make_fx(function, tracing_mode=mode)(gradients())
            named = [str(node.target) for node in graph.graph.nodes]
            calls = [name for name in named if "c10d" in name and "wait" not in name]
            assert len(calls) == wanted, (mode, named)
            assert graph(gradients()).tolist() == function(gradients()).tolist(), mode


def inference() -> None:
    with torch.inference_mode():
        assert functional(gradients())[0, 0] == 2 * WORLD + 1
        assert in_place(gradients())[0, 0] == 2 * WORLD + 1
        torch.compile(in_place)(gradients())


def experts() -> None:
    """Counts of a router's choices, made in one graph with them, are the sizes of what ranks exchange."""

    def exchange(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        chosen = logits.topk(2, -1).indices
        counts = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, chosen, True).sum(0)
        theirs = funcol.all_to_all_single(counts, [2] * WORLD, [2] * WORLD, dist.group.WORLD)
        sent, received = (each.view(WORLD, 2).sum(1).tolist() for each in (counts, theirs))
        for number in (*sent, *received):
            torch._check(number >= 0)
        torch._check(sum(sent) == chosen.numel())
        ordered = tokens[chosen.view(-1).argsort() // 2]
        return funcol.all_to_all_single(ordered, received, sent, dist.group.WORLD) * 2

    tokens = torch.randn(8192, 64, device="cuda")  # the logits are more than what is computed
    inputs = tokens, tokens @ torch.randn(64, 2 * WORLD, device="cuda")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        arrived = torch.compile(exchange, fullgraph=True)(*inputs)
    assert arrived.shape == exchange(*inputs).shape == (2 * 8192, 64)


def exported() -> None:
    class Reduced(nn.Module):
        def forward(self, part: torch.Tensor) -> torch.Tensor:
            return functional(part)

    program = torch.export.export(Reduced(), (gradients(),))
    assert program.module()(gradients())[0, 0] == 2 * WORLD + 1


for part in (
    asynchronous, given_group, optimizer_with_collectives, whole_step, compiled_optimizer, sharded_model,
    tensor_parallel, one_graph, one_graph_of_calls, traced, inference, experts, exported,
):  # fmt: skip
    if len(sys.argv) > 1 and part.__name__ not in sys.argv[1:]:
        continue
    try:
        torch._dynamo.reset()
        part()
    except Exception as error:
        traceback.print_exc()
        print(part.__name__, "failed", type(error).__name__, flush=True)
    else:
        print(part.__name__, "ok", flush=True)
