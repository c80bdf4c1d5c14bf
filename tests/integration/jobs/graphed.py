"""Training whose second block is compiled and whose third is a CUDA graph."""

import torch
from torch import nn

WIDTH, TOKENS = 1024, 512


class Block(nn.Module):
    """A product, and work that a compiler fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(self.linear(x)) * 2


class Model(nn.Module):
    """Eager, compiled, captured."""

    def __init__(self) -> None:
        super().__init__()
        self.eager, self.compiled, self.captured = Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.captured(self.compiled(self.eager(x)))


def main() -> None:
    """Five steps."""
    model = Model().cuda()
    model.compiled.compile()
    sample = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(model.captured, (sample,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.randn(TOKENS, WIDTH, device="cuda")
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
