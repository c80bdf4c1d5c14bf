"""The job of bench/step.py: a 10 B-parameter transformer, AdamW, bfloat16 autocast, 2,048 tokens a step, one GPU.

Prints the number of its parameters, then one line a step: "step_ms 73.1 cpu_ms 72.9", on the clock and of CPU time.
With ``--fake`` the tensors are FakeTensorMode's (on the GPU if there is one, else on the CPU); with ``--tracker``,
torch's MemTracker follows them.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and feed-forward of four times the width, each behind a LayerNorm with a residual connection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, dim] to the same."""
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def train(args: argparse.Namespace, device: str, stack: ExitStack) -> None:
    """Build the model and train it, under MemTracker where asked for."""
    dim, num_heads, vocab_size, num_tokens = 4_096, 32, 32_000, 2_048
    with torch.device(device):
        blocks = [Block(dim, num_heads) for _ in range(args.layers)]
        model = nn.Sequential(nn.Embedding(vocab_size, dim), *blocks, nn.Linear(dim, vocab_size))
        tokens = torch.randint(vocab_size, (1, num_tokens + 1))
    print("parameters", sum(parameter.numel() for parameter in model.parameters()), flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tracker = None
    if args.tracker:
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model, optimizer, tokens)
        stack.enter_context(tracker)
    for _ in range(args.steps):
        started = time.perf_counter()
        cpu_started = time.process_time()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if tracker is not None:
            tracker.reset_mod_stats()  # it follows one iteration
        if args.synchronize:
            torch.cuda.synchronize()
        step_ms = (time.perf_counter() - started) * 1e3
        print(f"step_ms {step_ms:.1f} cpu_ms {(time.process_time() - cpu_started) * 1e3:.1f}", flush=True)


def main() -> None:
    """Train for `--steps` steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--tracker", action="store_true")
    parser.add_argument("--synchronize", action="store_true", help="a step lasts until the GPU is done")
    args = parser.parse_args()
    with ExitStack() as stack:
        device = "cuda"
        if args.fake:
            from torch._subclasses.fake_tensor import FakeTensorMode

            # Fake CUDA tensors fail in backward where there is no GPU: autograd asks the driver for a context.
            device = "cuda" if torch.cuda.is_available() else "cpu"
            print("fake tensors on", device)
            stack.enter_context(FakeTensorMode())
        train(args, device, stack)


if __name__ == "__main__":
    main()
