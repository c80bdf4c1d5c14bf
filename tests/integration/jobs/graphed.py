"""Training whose second block is compiled, whose third is a CUDA graph, and whose optimizer has a kernel of its own."""

import torch
import triton
import triton.language as tl
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


@triton.jit
def decay(weight: tl.tensor, size: tl.constexpr) -> None:
    """Make the first numbers of a weight smaller."""
    place = weight + tl.arange(0, size)
    tl.store(place, tl.load(place) * 0.99)


class DecayingSGD(torch.optim.SGD):
    """First launches what is not an operation of torch."""

    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                decay[(1,)](parameter, 64)
        super().step()


def main() -> None:
    model = Model().cuda()
    model.compiled.compile()
    sample = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    torch.cuda.make_graphed_callables(model.captured, (sample,))
    optimizer = DecayingSGD(model.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.randn(TOKENS, WIDTH, device="cuda")
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
