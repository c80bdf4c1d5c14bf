"""Run cases as one rank, on stock torch's fake backend or as a job; two JSON lines for each on stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import collectives  # noqa: F401
import functional  # noqa: F401
import groups  # noqa: F401
import nested  # noqa: F401
import quantized  # noqa: F401
import replicated  # noqa: F401
import sharded  # noqa: F401
import sparse  # noqa: F401
import training  # noqa: F401
import transforms  # noqa: F401
from cases import CASES, Case, Rank

RESULT = "CASE "


def start(stock: tuple[int, int] | None) -> Rank:
    """Join the job; a stock job is (size, rank)."""
    if stock is None:
        dist.init_process_group("nccl")
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return Rank(dist.get_rank(), dist.get_world_size(), device)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size, rank = stock
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    return Rank(rank, size, torch.device("cpu"))


def outcome(case: Case, rank: Rank) -> str:
    """Empty if it passes; else the last line of its error."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    try:
        case.run(rank)
    except Exception as error:
        if os.environ.get("CASES_TRACE"):
            traceback.print_exc()
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"{type(error).__name__}: {said}"[:300]
    return ""


def main() -> None:
    """Run ``[--stock SIZE RANK] [NAME ...]``."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    names, stock = sys.argv[1:], None
    if names[:1] == ["--stock"]:
        stock, names = (int(names[1]), int(names[2])), names[3:]
    rank = start(stock)
    for case in CASES:
        called = f"{case.subject}.{case.name}"
        if names and called not in names:
            continue
        print(RESULT + json.dumps({"case": called, "error": None}), flush=True)  # it begins
        print(RESULT + json.dumps({"case": called, "error": outcome(case, rank)}), flush=True)


if __name__ == "__main__":
    main()
