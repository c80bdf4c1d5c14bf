"""Train under DeepSpeed: ``deepspeed_zero.py --stage 2 --offload --accumulate 2``. Runs as it is on a GPU too.

The optimizer is torch's; ``--optimizer fused`` takes DeepSpeed's own, compiled with nvcc, and ``--offload`` its
CPUAdam, compiled with g++.
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
from torch import nn

HIDDEN, LAYERS, VOCABULARY, TOKENS, BATCH = 1024, 4, 8192, 512, 2
#: Elements; DeepSpeed's own default is 500,000,000, which would hide everything else.
BUCKET = 10_000_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """The contents of a ds_config.json."""
    zero: dict[str, Any] = {"stage": options.stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    adam: dict[str, Any] = {"lr": 1e-4}
    if options.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if options.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    elif options.optimizer == "torch":
        adam["torch_adam"] = True
    if options.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": zero,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--zero-init", action="store_true", help="never hold a whole parameter, not even at first")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--optimizer", choices=["torch", "fused"], default="torch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--local_rank", type=int, help="what the deepspeed launcher gives to every script")
    options = parser.parse_args()
    with deepspeed.zero.Init(config_dict_or_path=configuration(options), enabled=options.zero_init):
        model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=configuration(options)
    )
    for _ in range(options.steps * options.accumulate):
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), device=engine.device)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps} loss {loss.item():.2f}", flush=True)


if __name__ == "__main__":
    main()
