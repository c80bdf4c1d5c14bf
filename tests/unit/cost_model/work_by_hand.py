from typing import Any

import pandas as pd

from fakedist.rundir.launch_records import WorkRow


def work(*rows: WorkRow) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(WorkRow._fields))


def product(m: int, n: int, k: int, **fields: Any) -> WorkRow:
    """A bf16 product of a linear layer's forward."""
    bytes_ = {"a_bytes": 2.0, "b_bytes": 2.0, "d_bytes": 2.0, "layout": "TN", "dtype": "bf16", "batch": 1} | fields
    flops = 2.0 * m * n * k * bytes_["batch"]
    return WorkRow("nvjet", "product", "gemm", "aten.mm.default", flops, 1.0, m=m, n=n, k=k, **bytes_)


def attention(tokens: int, direction: str = "forward", **fields: Any) -> WorkRow:
    """A causal self-attention of 32 heads of 128, by cuDNN."""
    found = {"batch": 1, "heads": 32, "kv_heads": 8, "queries": tokens, "keys": tokens, "width": 128} | fields
    found = {"value_width": found["width"], "causal": True, "library": "cudnn", "dtype": "bf16"} | found
    met = min(found.get("window") or found["keys"], found["keys"]) / 2
    widths = (found["width"] + found["value_width"]) * (1.0 if direction == "forward" else 2.5)
    flops = 2 * found["batch"] * found["heads"] * found["queries"] * met * widths
    return WorkRow("sdpa", "library", "attention", "aten.sdpa", flops, 1e6, attention=direction, **found)


def moving(moved_bytes: float, family: str = "elementwise", name: str = "kernel", operation: str = "") -> WorkRow:
    """A kernel that only moves bytes."""
    return WorkRow(name, "kernel", family, operation, 0.0, moved_bytes)
