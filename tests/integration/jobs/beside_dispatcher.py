"""Kernels that torch's dispatcher does not see: a stand-in for Transformer Engine's extension launches one."""

from __future__ import annotations

import sys
import types

import torch

ROWS, COLUMNS = 256, 512


def swiglu(x: torch.Tensor, quantizer: object) -> torch.Tensor:
    """Launches torch's spinning kernel, which is not an operation, after an allocation, which is one."""
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    torch.cuda._sleep(100)
    return out


def main() -> None:
    extension = types.ModuleType("transformer_engine_torch")
    extension.swiglu = swiglu  # type: ignore[attr-defined]
    sys.modules["transformer_engine_torch"] = extension
    parameter = torch.nn.Parameter(torch.ones(2, 2, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(3):
        x = torch.ones(ROWS, 2 * COLUMNS, device="cuda", dtype=torch.bfloat16)
        extension.swiglu(x, None)  # type: ignore[attr-defined]
        torch.cuda._sleep(100)
        parameter.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
