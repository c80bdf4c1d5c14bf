"""Two layers of experts, recomputed in the backward; prints what each layer sends and receives.

The second has a grouped product, and exchanges its counts by torch's functional collective, as torchtitan does.
The argument is the number of ranks that exchange tokens; without it, all do.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH, EXPERTS, TOP_K = 4096, 512, 16, 2
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
ranks = int(sys.argv[1]) if len(sys.argv) > 1 else dist.get_world_size()
group = dist.new_subgroups(ranks)[0]


class Experts(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.weights = torch.nn.Parameter(torch.randn(EXPERTS // ranks, WIDTH, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores, experts = self.gate(tokens).softmax(-1).topk(TOP_K)
        counts = torch.bincount(experts.view(-1), minlength=EXPERTS)
        if self.number:
            received = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group))
        else:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=group)
        sends, gets = counts.view(ranks, -1).sum(1).tolist(), received.view(ranks, -1).sum(1).tolist()
        print(json.dumps({"rank": dist.get_rank(), "layer": self.number, "sends": sends, "gets": gets}), flush=True)
        order = experts.view(-1).argsort(stable=True)
        come = all_to_all_single_autograd(tokens[order // TOP_K], gets, sends, group)
        if self.number:
            ends = received.view(ranks, -1).sum(0).cumsum(0).to(torch.int32)
            done = torch._grouped_mm(come.bfloat16(), self.weights.bfloat16(), offs=ends).float()
        else:
            done = torch.cat([part @ self.weights[0] for part in come.split(gets)])
        back = all_to_all_single_autograd(done, sends, gets, group)
        weighted = back * scores.view(-1)[order][:, None]
        return tokens + torch.zeros_like(tokens).index_add(0, order // TOP_K, weighted)


layers = torch.nn.ModuleList([Experts(number) for number in range(2)]).cuda()
optimizer = torch.optim.SGD(layers.parameters(), 1e-3)
for _ in range(2):
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    for layer in layers:
        hidden = checkpoint(layer, hidden, use_reentrant=False)
    hidden.square().mean().backward()
    optimizer.step()
