"""One small model that has everything that is hard to attribute; sizes are chosen so that every tensor's is its own."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 6 * width, bias=False), nn.Linear(6 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, vocabulary: int = 8000, width: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.plain = Block(width)
        self.checkpointed = Block(width)
        self.reentrant = Block(width)
        self.shared = Block(width)
        self.also_shared = self.shared
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embedding(tokens))
        x = self.plain(x)
        x = checkpoint(self.checkpointed, x, use_reentrant=False)
        x = checkpoint(self.reentrant, x, use_reentrant=True)
        x = self.also_shared(self.shared(x))
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tokens = torch.randint(8000, (4, 1024), device="cuda")
    for _ in range(3):
        with torch.no_grad():
            model(tokens[:1])
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
