"""nccl-tests' published logs, as ``make measured`` wrote them into ``fakedist/time/data/collectives.csv``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

from fakedist.errors import SetupError

TABLE = Path(__file__).parent / "data" / "collectives.csv"
COLUMNS = ("gpu", "operation", "nodes", "gpus_per_node", "bytes", "time_us", "origin")


@cache
def load_collectives(path: Path = TABLE) -> pd.DataFrame:
    """The logs.

    Returns:
        A row for each measured message, columns:

        - gpu: GPU model, as ``--gpu`` names it.
        - operation: all_reduce, all_gather, reduce_scatter, all_to_all, send.
        - nodes: Nodes, or NVLink domains.
        - gpus_per_node: GPUs of each that take part.
        - bytes: Bytes of the whole buffer (nccl-tests' size).
        - time_us: Microseconds, out of place.
        - origin: Where it is from.

    Raises:
        SetupError: The table is missing or damaged.
    """
    try:
        found = pd.read_csv(path)
    except FileNotFoundError:
        raise SetupError(
            f"the measured times of collectives are missing: {path}", "make measured writes them"
        ) from None
    except (OSError, ValueError) as error:
        raise SetupError(f"the measured times of collectives are damaged: {path}: {error}", "make measured") from error
    if list(found.columns) != list(COLUMNS) or not (found["time_us"] > 0).all():
        raise SetupError(f"the measured times of collectives are damaged: {path}", "make measured writes them")
    return found
