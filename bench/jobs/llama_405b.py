"""The large job of bench/step.py: Llama 3 405B, whole on one GPU, 8,192 tokens a step, bfloat16, AdamW.

The model is the one of examples/llama_fsdp2.py, not sharded. Prints one line a step: "step_ms 2731.0 cpu_ms 2729.5".
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llama_fsdp2 import MODELS, Transformer, cross_entropy


def main() -> None:
    """Train for `--steps` steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8_192)
    args = parser.parse_args()
    config = MODELS["405b"]
    with torch.device("meta"):
        model = Transformer(config, args.tokens).to(torch.bfloat16)
    model.to_empty(device="cuda")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(config.vocab_size, (1, args.tokens + 1), device="cuda")
    for _ in range(args.steps):
        started = time.perf_counter()
        cpu_started = time.process_time()
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_ms = (time.perf_counter() - started) * 1e3
        print(f"step_ms {step_ms:.1f} cpu_ms {(time.process_time() - cpu_started) * 1e3:.1f}", flush=True)


if __name__ == "__main__":
    main()
