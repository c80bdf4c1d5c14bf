"""Write ``fakedist/cost_model/data/collectives.csv`` from published logs of nccl-tests: part of ``make measured``.

    python bench/measured/collectives.py DIRECTORY

DIRECTORY is ``aiconfigurator_core/systems/data`` of aiconfigurator-core 0.12.0. Its traps: ``message_size`` counts
elements, latencies are in milliseconds, and several versions of NCCL measured one shape: the table holds the newest.
README.md lists the sources of the other two files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
TABLE = HERE.parent.parent / "fakedist" / "cost_model" / "data" / "collectives.csv"
#: The directory of a GPU model in the source -> our name of the GPU.
SYSTEMS = {
    "a100_sxm": "a100-80g",
    "h100_sxm": "h100-80g",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
COLUMNS = ["gpu", "operation", "nodes", "gpus_per_node", "bytes", "time_us", "origin"]
OPERATIONS = {"alltoall": "all_to_all", "sendrecv": "send"}
_HALF_BYTES = 2


def main() -> None:
    """Write the table."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(f"usage: {sys.argv[0]} aiconfigurator_core/systems/data")
    parts = [one_node(Path(sys.argv[1]) / directory, gpu) for directory, gpu in SYSTEMS.items()]
    table = pd.concat([*parts, nvl72(), nodes()], ignore_index=True)
    table["operation"] = table["operation"].replace(OPERATIONS)
    keys = ["gpu", "operation", "nodes", "gpus_per_node", "bytes"]
    table = table.drop_duplicates(keys).sort_values(keys, ignore_index=True)
    table["time_us"] = table["time_us"].round(2)
    table[COLUMNS].to_csv(TABLE, index=False)
    print(f"{TABLE}: {len(table)} rows")


def one_node(source: Path, gpu: str) -> pd.DataFrame:
    """nccl-tests on 2, 4 and 8 GPUs of one node."""
    files = sorted((source / "comm" / "nccl").glob("*/nccl_perf.parquet"))
    found = pd.concat([pd.read_parquet(path).assign(folder=path.parent.name) for path in files])
    found = found[(found["nccl_dtype"] == "half") & (found["latency"] > 0)]
    newest = sorted(found["folder"].unique(), key=_version)[-1]  # the column ``version`` can disagree with the folder
    found = found[found["folder"] == newest]
    found = found.groupby(["op_name", "num_gpus", "message_size"], as_index=False)["latency"].median()
    return pd.DataFrame(
        {
            "gpu": gpu,
            "operation": found["op_name"],
            "nodes": 1,
            "gpus_per_node": found["num_gpus"],
            "bytes": found["message_size"] * _HALF_BYTES,
            "time_us": found["latency"] * 1e3,
            "origin": f"aiconfigurator-core 0.12.0, NCCL {newest}",
        }
    )


def nvl72() -> pd.DataFrame:
    """nccl-tests on 8 to 64 GPUs of a GB200 NVL72, all of them in one NVLink domain."""
    found = pd.read_csv(HERE / "nccl_nvl72.csv")
    return pd.DataFrame(
        {
            "gpu": found["gpu"],
            "operation": found["op_name"],
            "nodes": 1,
            "gpus_per_node": found["num_gpus"],
            "bytes": found["bytes"],
            "time_us": found["us"],
            "origin": "aiconfigurator 0.6.0, NCCL 2.23",
        }
    )


def nodes() -> pd.DataFrame:
    """nccl-tests on nodes of eight H100 with InfiniBand NDR."""
    found = pd.read_csv(HERE / "nccl_h100_ib_multinode.csv")
    return pd.DataFrame(
        {
            "gpu": "h100-80g",
            "operation": found["collective"],
            "nodes": found["nodes"],
            "gpus_per_node": found["gpus_per_node"],
            "bytes": found["bytes"],
            "time_us": found["time_us"],
            "origin": "nccl-tests-cluster @455de4f8, NCCL 2.29.2",
        }
    )


def _version(folder: str) -> tuple[int, ...]:
    return tuple(int(part) for part in folder.split("."))


if __name__ == "__main__":
    main()
