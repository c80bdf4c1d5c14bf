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


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2  # own backward


class TorchsBackward(OwnBackward):
    backward = staticmethod(eval(compile("lambda ctx, grad: grad.exp()", str(nn.__file__), "eval")))


def by_lines(x: torch.Tensor) -> torch.Tensor:
    """Each operation of which a backward allocates on a line of its own, which its comment names."""
    left, right = x.split(384, dim=1)  # split
    left = left * right.sigmoid()  # gate
    left = torch.relu_(left)  # in place
    left = left.view(3, 32, 384).transpose(0, 1).clone()  # view
    left[:, 0] = 1.0  # write to a view
    left = OwnBackward.apply(left)  # own function
    left = TorchsBackward.apply(left)  # function of torch
    left.register_hook(lambda grad: grad + 1)  # hook
    return nn.functional.cross_entropy(left.flatten(0, 1), torch.zeros(96, dtype=torch.int64, device=x.device))  # loss


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
        loss = loss + by_lines(torch.ones(96, 768, device="cuda", requires_grad=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
