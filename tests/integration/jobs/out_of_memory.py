"""Needs more memory than it is given, in the way its first argument names; test_out_of_memory.py runs it."""

from __future__ import annotations

import sys

import torch
from torch import nn

MIB = 1 << 20


class Block(nn.Module):
    """24 MiB of parameters; each row of its input saves 16 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 3072), nn.Linear(3072, 1024)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add to the rows."""
        return rows + self.down(torch.relu(self.up(rows)))


def train(num_rows: int) -> None:
    """Steps of four blocks, of which two are recorded.

    Their parameters are 96 MiB, and so are the gradients; AdamW's state is twice that.
    """
    model = nn.Sequential(*(Block() for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(30):
        model(torch.ones(num_rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("free", torch.cuda.mem_get_info()[0] // MIB, flush=True)


def by_name(num_mib: int) -> int:
    """Halve what is asked for until it fits."""
    while True:
        try:
            torch.empty(num_mib * MIB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            num_mib //= 2
        else:
            return num_mib


def is_full(error: BaseException) -> bool:
    """As in the libraries that halve batches."""
    return isinstance(error, RuntimeError) and "CUDA out of memory." in error.args[0]


def by_text(num_mib: int) -> int:
    """The same, by the error's text."""
    while True:
        try:
            torch.empty(num_mib * MIB, dtype=torch.uint8, device="cuda")
        except Exception as error:
            if not is_full(error):
                raise
            num_mib //= 2
        else:
            return num_mib


def main(how: str) -> None:
    """Train, and before that look for a size that fits, or take less of the GPU."""
    if how == "finders":
        print("found", by_name(1000), by_text(3000), flush=True)
    if how == "fraction":
        torch.cuda.set_per_process_memory_fraction(0.5)
        print("fraction", torch.cuda.get_per_process_memory_fraction(), flush=True)
    if how == "pool":
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            held = torch.empty(600 * MIB, dtype=torch.uint8, device="cuda")
            del held
    train({"first_forward": 12_000, "forward": 3_300, "fraction": 3_300, "backward": 2_100}.get(how, 1_000))


main(sys.argv[1])
