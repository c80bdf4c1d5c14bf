"""Write ``fakedist/extras/experts/dispatchers.csv`` from published times: part of ``make measured``.

    python bench/measured/dispatchers.py

Of DeepEP and HybridEP. The sources count tokens (top 8 of 256 experts, hidden 7168; dispatch in fp8, combine in bf16)
or bandwidth at 4,096 tokens. Both become the bytes that a rank sends to other ranks, or over nodes to other nodes,
where a token goes once to each: random choices of experts give how many. README.md lists the sources.
"""

from __future__ import annotations

from math import comb
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "fakedist" / "extras" / "experts" / "dispatchers.csv"
COLUMNS = ["gpu", "ranks", "sms", "operation", "bytes", "time_us", "origin"]
HIDDEN, TOPK, EXPERTS, TOKENS = 7168, 8, 256, 4096
GPUS = {"h100_sxm": "h100-80g", "h200_sxm": "h200", "B200": "b200", "GB200": "gb200"}


def main() -> None:
    """Write the table."""
    times = normal_times()
    table = pd.concat([times, bandwidths(times), hybrid_bandwidths(times)], ignore_index=True)
    keys = ["gpu", "operation", "ranks", "sms", "bytes"]
    table = table.sort_values(keys, ignore_index=True).round({"time_us": 2, "bytes": 0}).astype({"bytes": "int64"})
    table[COLUMNS].to_csv(TABLE, index=False)
    print(f"{TABLE}: {len(table)} rows")


def hit(num_parts: int, experts: int = EXPERTS) -> float:
    """The chance that a token has an expert in one of so many equal parts of the experts."""
    return 1 - comb(experts - experts // num_parts, TOPK) / comb(experts, TOPK)


def sent(ranks: int) -> float:
    """How often a token is sent to other ranks of a node, or to other nodes of eight."""
    parts = ranks if ranks <= 8 else ranks // 8
    return (parts - 1) * hit(parts)


def normal_times() -> pd.DataFrame:
    """Times by tokens, with the kernels that exchange counts."""
    rows = pd.read_csv(HERE / "deepep_normal_multinode.csv")
    parts = []
    for operation, width in (("dispatch", 1), ("combine", 2)):
        ranks = 8 * rows["node_num"]
        parts.append(
            pd.DataFrame(
                {
                    "gpu": rows["gpu"].map(GPUS),
                    "ranks": ranks,
                    "sms": rows[f"{operation}_sms"],
                    "operation": operation,
                    "bytes": rows["num_token"] * ranks.map(sent) * HIDDEN * width,
                    "time_us": rows[f"{operation}_transmit_us"] + rows[f"{operation}_notify_us"],
                    "origin": "aisimulate 0.13",
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def bandwidths(times: pd.DataFrame) -> pd.DataFrame:
    """Times of 4,096 tokens by the bytes that a rank gets, its own included; those of one token are an H100's."""
    rows = pd.read_csv(HERE / "hybridep_deepep_bandwidth.csv")
    rows = rows[rows["library"] == "DeepEP"]
    h100 = times[(times["gpu"] == "h100-80g") & (times["ranks"] == 8)]
    made = []
    for row in rows.itertuples():
        ranks = int(row.ranks)
        for operation, bandwidth in (("dispatch", row.dispatch_bf16_GBps), ("combine", row.combine_GBps)):
            least_us = h100.loc[h100["operation"] == operation, "time_us"].min()
            time_us = TOKENS * ranks * hit(ranks) * HIDDEN * 2 / (bandwidth * 1e3)
            own = (GPUS[row.gpu], ranks, int(row.sms), operation)
            origin = "DeepEP hybrid-ep @94a9f8f"
            made.append((*own, sent(ranks) * HIDDEN * 2, least_us, "aisimulate 0.13"))
            made.append((*own, TOKENS * sent(ranks) * HIDDEN * 2, max(time_us, least_us), origin))
    return pd.DataFrame(made, columns=COLUMNS)


def hybrid_bandwidths(times: pd.DataFrame) -> pd.DataFrame:
    """Times of HybridEP's kernels, by the bytes that a rank gets, or that come from all nodes; 8 experts for each rank.

    Those of one token are DeepEP's, on an H100 with as many nodes.
    """
    rows = pd.read_csv(HERE / "hybridep_deepep_bandwidth.csv")
    rows = rows[(rows["library"] == "HybridEP") & (rows["timing"] == "kernel")]
    h100 = times[times["gpu"] == "h100-80g"]
    made = []
    for row in rows.itertuples():
        is_over_nodes = row.gpu == "H100"
        ranks, parts = int(row.ranks), int(row.ranks) // 8 if is_over_nodes else int(row.ranks)
        reached = hit(parts, 8 * ranks) * HIDDEN * 2
        for operation, bandwidth in (("dispatch", row.dispatch_bf16_GBps), ("combine", row.combine_GBps)):
            alike = h100[(h100["ranks"] == (ranks if is_over_nodes else 8)) & (h100["operation"] == operation)]
            time_us = TOKENS * parts * reached / (bandwidth * 1e3)
            own = ("h100-80g" if is_over_nodes else GPUS[row.gpu], ranks, int(row.sms), f"hybrid_ep_{operation}")
            made.append((*own, (parts - 1) * reached, alike["time_us"].min(), "aisimulate 0.13"))
            made.append((*own, TOKENS * (parts - 1) * reached, time_us, "DeepEP hybrid-ep @94a9f8f"))
    return pd.DataFrame(made, columns=COLUMNS)


if __name__ == "__main__":
    main()
