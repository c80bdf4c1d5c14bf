"""A training of a small model, with recomputation and accumulated gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def _network(width: int = 512) -> nn.Module:
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(1000, width), nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(width, 1000)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for place, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=place == 1) if place else block(x)
            return torch.as_tensor(self.head(x))

    return Network()


def training() -> list[object]:
    """Train for four steps, and return what a script would read."""
    import torch

    read: list[object] = []
    with torch.device("cuda"):
        model = _network()
        tokens = torch.randint(1000, (4, 257))
    read.append(tokens.sum().item())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        for micro in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
                logits = model(tokens[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            read.append((step, micro, loss.item()))
        read.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
        bias = next(p for name, p in model.named_parameters() if name.endswith("norm.bias"))
        read.append(bias.sum().item())
    return read
