"""Write the tables of ``fakedist/cost_model/data`` from published measurements: ``make measured``.

    python bench/measured/make.py DIRECTORY

DIRECTORY is ``aiconfigurator_core/systems/data`` of aiconfigurator-core 0.12.0. Its traps: latencies are in
milliseconds; several collectors and versions measured one shape (the table holds the median, but for ``ONLY_BY``);
experts' times include gate and permutation, and only balanced routing counts. README.md lists the sources.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

HERE = Path(__file__).parent
DATA = HERE.parent.parent / "fakedist" / "cost_model" / "data"
SOURCE = "aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0)"

#: The directory of a GPU model in the source -> the table's name.
SYSTEMS = {
    "a100_sxm": "a100-sxm",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
#: The source's name of a product's type -> ours.
PRODUCTS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
#: The types of which one collector counts, if it measured them: TensorRT-LLM's fp8 is cuBLAS with a scale a tensor, as
#: Transformer Engine and torch call it; vLLM's and SGLang's are CUTLASS kernels with a scale for each row and column.
ONLY_BY = {"fp8": "TRTLLM"}
#: Attention rows with less than this many FLOPs say more about the collector than about the kernel.
LEAST_ATTENTION_FLOPS = 1e8
#: Attention of one query to shorter contexts takes as long as to these, within the collectors' noise.
LEAST_CONTEXT = 64

#: Times are stored as log2 of microseconds in steps of 1/1024 (0.07 %).
STEPS = 1024
UNKNOWN = -32768

Arrays = dict[str, npt.NDArray[np.generic]]


def main() -> None:
    """Write every table."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit(f"usage: {sys.argv[0]} aiconfigurator_core/systems/data")
    DATA.mkdir(exist_ok=True)
    for directory, name in SYSTEMS.items():
        source = Path(sys.argv[1]) / directory
        arrays: Arrays = {}
        origins: dict[str, list[str]] = {}
        for part in (products, attention_forward, attention_decoding, grouped, quantise):
            part(source, arrays, origins)
        training(name, arrays, origins)
        arrays["origins"] = np.frombuffer(json.dumps(origins, indent=1).encode(), np.uint8)
        path = DATA / f"{name}.npz"
        np.savez_compressed(path, allow_pickle=False, **arrays)
        print(f"{path.name}: {path.stat().st_size:,} bytes, {', '.join(sorted(origins))}")


def products(source: Path, arrays: Arrays, origins: dict[str, list[str]]) -> None:
    """``products.TYPE``: times over the axes m, n, k of (m, k) x (k, n); UNKNOWN where nothing was measured."""
    rows, files = _read(source, "gemm/*/*/gemm_perf.parquet")
    for kind, name in PRODUCTS.items():
        own = rows[(rows["gemm_dtype"] == kind) & (rows["latency"] > 0)]
        if (own["framework"] == ONLY_BY.get(kind)).any():
            own = own[own["framework"] == ONLY_BY[kind]]
        if own.empty:
            continue
        collectors = own.groupby(["m", "n", "k", "framework", "version", "kernel_source"])["latency"].median()
        shapes = collectors.groupby(["m", "n", "k"])
        median = shapes.median()
        axes = [np.unique(median.index.get_level_values(axis)).astype(np.int32) for axis in "mnk"]
        grid = np.full([len(axis) for axis in axes], UNKNOWN, np.int16)
        places = [
            np.searchsorted(axis, median.index.get_level_values(each)) for axis, each in zip(axes, "mnk", strict=True)
        ]
        grid[tuple(places)] = _packed(median)
        arrays |= {f"products.{name}": grid}
        arrays |= {f"products.{name}.{axis}": values for axis, values in zip("mnk", axes, strict=True)}
        # How far two collectors are from each other on one shape: what no model can be better than.
        several = collectors[shapes.transform("size") > 1]
        apart = np.log(several / several.groupby(["m", "n", "k"]).transform("median"))
        large = (apart.index.to_frame()[["m", "n", "k"]] >= 256).all(axis=1).to_numpy()
        if large.any():
            arrays[f"products.{name}.noise"] = np.quantile(apart[large], [0.05, 0.5, 0.95]).astype(np.float32)
        origins[f"products.{name}"] = files


def attention_forward(source: Path, arrays: Arrays, origins: dict[str, list[str]]) -> None:
    """``attention.forward.*``: causal self-attention in bf16, by batch, heads, kv_heads, tokens and width."""
    rows, files = _read(source, "attention/*/*/context_attention_perf.parquet")
    if rows.empty:
        return
    rows = rows[(rows["attn_dtype"] == "bfloat16") & (rows["kv_cache_dtype"] == "bfloat16") & (rows["latency"] > 0)]
    if "window_size" in rows:
        rows = rows[rows["window_size"].fillna(0) == 0]
    names = {"batch_size": "batch", "num_heads": "heads", "num_key_value_heads": "kv_heads", "isl": "tokens"}
    rows = rows.rename(columns=names | {"head_dim": "width"})
    rows["flops"] = 2.0 * rows.batch * rows.heads * rows.tokens * (rows.tokens + 1) * rows.width
    rows = rows[rows["flops"] >= LEAST_ATTENTION_FLOPS]
    shape = ["batch", "heads", "kv_heads", "tokens", "width"]
    median = rows.groupby([*shape, "framework", "version"])["latency"].median().groupby(shape).median()
    for column in shape:
        arrays[f"attention.forward.{column}"] = median.index.get_level_values(column).to_numpy().astype(np.int32)
    arrays["attention.forward.time"] = _packed(median)
    origins["attention.forward"] = files


def attention_decoding(source: Path, arrays: Arrays, origins: dict[str, list[str]]) -> None:
    """``attention.decoding.*``: one query a sequence, bf16, by batch, heads, kv_heads, context and width.

    Only vLLM's collector counts, and of it the last release and the kernel that vLLM chooses there: rollouts of
    reinforcement learning run it. Each sequence of a batch has the same context.
    """
    rows, files = _read(source, "attention/vllm/*/generation_attention_perf.parquet")
    if rows.empty:
        return
    rows = rows[(rows["attn_dtype"] == "bfloat16") & (rows["kv_cache_dtype"] == "bfloat16") & (rows["latency"] > 0)]
    if "window_size" in rows:
        rows = rows[rows["window_size"].fillna(0) == 0]
    last = max(rows["version"].unique(), key=lambda version: [int(part) for part in version.split(".")])
    rows = rows[rows["version"] == last]
    rows["context"] = rows["isl"] + rows["step"]
    rows = rows[rows["context"] >= LEAST_CONTEXT]
    names = {"batch_size": "batch", "num_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "width"}
    shape = ["heads", "kv_heads", "width", "batch", "context"]
    median = rows.rename(columns=names).groupby(shape)["latency"].median()
    for column in shape:
        arrays[f"attention.decoding.{column}"] = median.index.get_level_values(column).to_numpy().astype(np.int32)
    arrays["attention.decoding.time"] = _packed(median)
    origins["attention.decoding"] = [file for file in files if f"/{last}/" in file]


def grouped(source: Path, arrays: Arrays, origins: dict[str, list[str]]) -> None:
    """``grouped.*``: the experts of one layer, gated, bf16, balanced routing, with gate and permutation.

    Only TensorRT-LLM's collector counts, whose CUTLASS kernels are those of torch's grouped products. SGLang's computes
    every token on every expert-parallel rank, so its times say nothing about a rank's own rows.
    """
    rows, files = _read(source, "moe/*/*/moe_perf.parquet")
    if rows.empty:
        return
    rows = rows[(rows["moe_dtype"] == "bfloat16") & (rows["distribution"] == "balanced") & (rows["latency"] > 0)]
    rows = rows[(rows["framework"] == "TRTLLM") & ~rows["kernel_source"].str.contains("nongated")]
    rows = rows[rows["num_experts"] % rows["moe_ep_size"] == 0]
    rows["experts"] = rows["num_experts"] // rows["moe_ep_size"]
    rows["inner"] = rows["inter_size"] // rows["moe_tp_size"]
    rows["rows"] = rows["num_tokens"] * rows["topk"] // rows["moe_ep_size"]
    rows = rows[rows["rows"] >= rows["experts"]].rename(columns={"hidden_size": "hidden"})
    shape = ["rows", "experts", "hidden", "inner"]
    median = rows.groupby([*shape, "framework", "version", "kernel_source"])["latency"].median()
    best = median.groupby(shape).median()
    for column in shape:
        arrays[f"grouped.{column}"] = best.index.get_level_values(column).to_numpy().astype(np.int32)
    arrays["grouped.time"] = _packed(best)
    origins["grouped"] = files


def quantise(source: Path, arrays: Arrays, origins: dict[str, list[str]]) -> None:
    """``quantise.*``: bf16 to fp8 by a given scale, over m and k: a read of two bytes and a write of one."""
    rows, files = _read(source, "quantize/*/*/scale_matrix_perf.parquet")
    if rows.empty:
        return
    median = rows[rows["latency"] > 0].groupby(["m", "k"])["latency"].median()
    for column in ("m", "k"):
        arrays[f"quantise.{column}"] = median.index.get_level_values(column).to_numpy().astype(np.int32)
    arrays["quantise.time"] = _packed(median)
    origins["quantise"] = files


def training(name: str, arrays: Arrays, origins: dict[str, list[str]]) -> None:
    """Tables of training kernels next to this file, as text: columns differ by table, and they are small."""
    for table, gpus in (
        ("sdpa_training", {"h200-sxm": "NVIDIA H200", "gb200": "NVIDIA GB200"}),
        ("norms_training", {"h200-sxm": "NVIDIA H200", "gb200": "NVIDIA GB200"}),
        ("liger_h100_elementwise_ms", {"h100-sxm": ""}),
    ):
        if name not in gpus:
            continue
        rows = pd.read_csv(HERE / f"{table}.csv")
        if gpus[name]:
            rows = rows[rows["gpu_name"] == gpus[name]]
        arrays[table] = np.frombuffer(rows.to_csv(index=False).encode(), np.uint8)
        origins[table] = [f"bench/measured/{table}.csv"]


def _packed(milliseconds: pd.Series[float]) -> npt.NDArray[np.int16]:
    return np.round(np.log2(milliseconds.to_numpy() * 1e3) * STEPS).astype(np.int16)


def _read(source: Path, pattern: str) -> tuple[pd.DataFrame, list[str]]:
    found = sorted(source.glob(pattern))
    if not found:
        return pd.DataFrame(), []
    rows = pd.concat([pd.read_parquet(path) for path in found], ignore_index=True)
    return rows, [f"{SOURCE}: {path.relative_to(source.parent).as_posix()}" for path in found]


if __name__ == "__main__":
    main()
