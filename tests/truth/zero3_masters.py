"""The job of DeepSpeedExamples' training/bf16_master_weight, by ZeRO-3: ``zero3_masters.py fp32`` or ``bf16``.

32 encoder layers of 4,096, each recomputed, one random sequence of 512 tokens; masters, gradients and moments of AdamW
in fp32, or all in bf16 under autocast. What the library does there is DeepSpeed's own; its AdamW is compiled by nvcc.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, WORDS, TOKENS, STEPS = 32, 4096, 32, 50_257, 512, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
        x = self.norm1(x + attended)
        return self.norm2(x + self.ff(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0).expand(tokens.shape[0], -1)
        x = self.embedding(tokens) + self.positions(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.output(x)


def configuration(masters: str) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    is_bf16 = masters == "bf16"
    in_bf16 = dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), True) if is_bf16 else {}
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e7}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "bf16": {"enabled": True, **in_bf16},
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": 0},
        "torch_autocast": {"enabled": is_bf16, "dtype": "torch.bfloat16"},
    }


def main(masters: str) -> None:
    """Train for some steps."""
    deepspeed.init_distributed()
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(masters))
    loss_function = nn.CrossEntropyLoss()
    for _ in range(STEPS):
        tokens, labels = (torch.randint(0, WORDS, (1, TOKENS), device=device) for _ in range(2))
        with torch.autocast("cuda", torch.bfloat16, enabled=masters == "bf16"):
            logits = engine(tokens)  # alive until the next step's, as there
            loss = loss_function(logits.view(-1, WORDS), labels.view(-1))
        loss.backward()
        engine.step()
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
