"""The tokens and samples of a step: rows that a model multiplies by its weights, and rows of its input.

A token is a row that passes through the model's layers. Embeddings alone do not tell: models look up positions,
segments, users and labels besides, or several codebooks for each token, and compiled code looks up without an
operation. So the products count: most of a model's layers multiply as many rows as it has tokens, in eager and compiled
code alike. Where an embedding looks up as many rows as products multiply, these are the tokens; otherwise those of
most products. Parts that differ (an encoder and a decoder, text and images) have no tokens in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.axes import Replicas, find_replicas
from fakedist.rundir.notes import counted
from fakedist.rundir.step_time import RankThroughput, SampleThroughput, StepTime

#: Shares of the FLOPs of products with weights: what makes a number of rows worth a look (a head, a table of labels
#: make less), what makes two numbers of rows two parts of a model, and what makes one the model's.
_SOME, _PART, _MOST = 0.05, 0.25, 0.6
_LOOKUP = "aten.embedding.default"
#: Classes that embed tokens, and those that embed something else.
_EMBEDS, _EMBEDS_OTHERS = r"Embedding$", r"Rotary|Posi|Patch|Time|Sinus|Label|Class"
_BY_INDUCTOR = "triton_"


@dataclass(frozen=True)
class StepTokens:
    """The tokens and micro-batches that a rank reads in the timed step; 0 if unknown, for the reason ``why``.

    ``are_embedded``: an embedding looks up that many rows. Else they are the rows of most products.
    """

    number: int
    num_micro_batches: int
    why: str = ""
    are_embedded: bool = True


@dataclass(frozen=True)
class StepSamples:
    """The samples that a rank reads in the timed step, 0 if unknown, and the shape of one, such as "3x224x224"."""

    number: int = 0
    shape: str = ""


def tokens_of(tables: Mapping[str, pd.DataFrame]) -> StepTokens:
    """Count the tokens of a step, by its tables ``launches`` and ``work``, and by ``layers`` and ``steps`` if given."""
    launches, work = tables["launches"], tables["work"]
    forward = forward_of(launches)
    lookups, products = _lookups(forward, work), _products(forward, work)
    if not len(lookups) and not _embeds_compiled(forward, work, tables.get("layers")):
        return StepTokens(0, 0, "no embedding was seen in the forward pass")
    if not len(products):
        return StepTokens(0, 0, "no product follows the embedding")
    found = _found(lookups, products, _convolutions(forward, work))
    if found.number and found.number == samples_of(tables).number and not _attends(forward, work):
        return StepTokens(0, 0, "each sample is a single row")
    return found


def _found(lookups: pd.DataFrame, products: pd.DataFrame, others: float) -> StepTokens:
    """The tokens, from the rows of each embedding and of each product with weights; ``others``: further FLOPs."""
    weights = products.groupby("rows")["flops"].sum().sort_values(ascending=False)
    share = weights / (weights.sum() + others)
    most = int(share.index[0])
    known = share[share.index.isin(lookups["rows"]) & (share >= _SOME)]
    if len(known):
        number = int(known.index[0])
        # Experts, or several products of one layer, multiply a multiple of the tokens.
        if most % number or (len(known) > 1 and known.iloc[1] >= _PART * known.iloc[0]):
            return StepTokens(0, 0, "parts of the model read sequences of different lengths")
        return _of_rows(products, number)
    own = products[products["rows"] == most]
    runs, per_run = int(own["runs"].min()), most / own["runs"].min()
    is_same = (lookups["rows"] == per_run * lookups["runs"]) & (lookups["runs"] != runs)
    if is_same.any():
        return StepTokens(0, 0, "the embedding and the products after it do not run equally often")
    if share.iloc[0] < _MOST:
        return StepTokens(0, 0, "the products of the model's layers read different numbers of rows")
    return StepTokens(most, runs, are_embedded=False)


def _of_rows(products: pd.DataFrame, number: int) -> StepTokens:
    return StepTokens(number, int(products.loc[products["rows"] == number, "runs"].min()))


def _lookups(forward: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """Find the rows that each embedding looks up in the step: ``rows``, and the ``runs`` that do so."""
    looks_up = ((work["operation"].astype(str) == _LOOKUP) & (work["m"] > 0)).to_numpy(bool)
    own = forward[looks_up[forward["work"].to_numpy("i8")]].drop_duplicates(["op", "layer"])
    rows = work["m"].to_numpy("i8")[own["work"].to_numpy("i8")]
    frame = pd.DataFrame({"layer": own["layer"].to_numpy("i8"), "rows": rows, "runs": 1})
    return frame.groupby("layer", as_index=False).sum()


def _products(forward: pd.DataFrame, work: pd.DataFrame) -> pd.DataFrame:
    """Find the rows that each product with weights multiplies in the step: ``rows``, ``runs`` and ``flops``.

    A product is a layer and the sizes of its weights. Batches of products, such as those of an attention, have none.
    """
    sizes = work[["m", "n", "k", "batch"]].to_numpy("i8")
    has_weights = (work["family"].astype(str) == "gemm").to_numpy(bool) & (sizes[:, :3] > 0).all(axis=1)
    has_weights &= sizes[:, 3] <= 1
    own = forward[has_weights[forward["work"].to_numpy("i8")]]
    at = own["work"].to_numpy("i8")
    frame = pd.DataFrame(
        {
            "layer": own["layer"].to_numpy("i8"),
            "n": sizes[at, 1],
            "k": sizes[at, 2],
            "rows": sizes[at, 0],
            "runs": 1,
            "flops": np.nan_to_num(work["flops"].to_numpy("f8")[at]),
        }
    )
    return frame.groupby(["layer", "n", "k"], as_index=False).sum()


def _convolutions(forward: pd.DataFrame, work: pd.DataFrame) -> float:
    """FLOPs of convolutions, which have no rows."""
    is_one = work["operation"].astype(str).str.contains("conv").to_numpy(bool)
    flops = np.where(is_one, np.nan_to_num(work["flops"].to_numpy("f8")), 0.0)
    return float(flops[forward["work"].to_numpy("i8")].sum())


def _attends(forward: pd.DataFrame, work: pd.DataFrame) -> bool:
    of_work = (work["family"].astype(str) == "attention").to_numpy(bool)
    return bool(of_work[forward["work"].to_numpy("i8")].any())


def _embeds_compiled(forward: pd.DataFrame, work: pd.DataFrame, layers: pd.DataFrame | None) -> bool:
    """Return whether a model that embeds tokens runs in Inductor's code, which looks up without an operation."""
    if layers is None:
        return False
    is_inductors = work["name"].astype(str).str.startswith(_BY_INDUCTOR).to_numpy(bool)
    classes = layers["class_name"].astype(str)
    names = classes + " " + layers["name"].astype(str).str.rpartition(".")[2].str.capitalize()
    embeds = classes.str.contains(_EMBEDS) & ~names.str.contains(_EMBEDS_OTHERS)
    return bool(embeds.any()) and bool(is_inductors[forward["work"].to_numpy("i8")].any())


def forward_of(launches: pd.DataFrame) -> pd.DataFrame:
    """The launches with work of the forward passes, without those that backward runs again."""
    is_forward = (launches["phase"].astype(str) == "forward") & ~launches["recompute"].astype(bool)
    return launches[is_forward & (launches["work"] >= 0)]


def samples_of(tables: Mapping[str, pd.DataFrame]) -> StepSamples:
    """The samples of the timed step, of ``launches``, as ``steps`` knows them; of the last step that has any, else."""
    launches, steps = tables["launches"], tables.get("steps")
    if steps is None or "samples" not in steps or not len(launches):
        return StepSamples()
    known = steps[steps["samples"] > 0]
    if not len(known):
        return StepSamples()
    timed = known[known["step"] == int(launches["step"].iloc[0])]
    row = (timed if len(timed) else known).iloc[-1]
    return StepSamples(int(row["samples"]), str(row["sample_shape"]))


def tokens_text(tokens: StepTokens, rank: int, replicas: Replicas) -> str:
    """The arithmetic of the tokens of a job."""
    batches = counted(tokens.num_micro_batches, "micro-batch", "micro-batches")
    does = f"that rank {rank} embeds" if tokens.are_embedded else f"rows that most layers of rank {rank} multiply"
    return f"{tokens.number:,} {does} in {batches}, times {replicas.number:,} ({replicas.text})"


def rank_throughput(
    tables: Mapping[str, pd.DataFrame], time: StepTime, rank: int, world_size: int
) -> tuple[RankThroughput | None, SampleThroughput | None]:
    """The tokens and the samples per second of a job whose ranks are all as fast as this one.

    None unless they are certain: the rank's groups show how many ranks read tokens of their own, and it neither waits
    for a pipeline nor has collectives of unknown duration.
    """
    launches, calls = tables["launches"], tables["calls"]
    own = calls[calls["step"] == int(launches["step"].iloc[0])]
    if time.num_unknown_calls or own["operation"].astype(str).isin(("send", "recv")).any():
        return None, None
    replicas = find_replicas(tables["groups"], own, world_size)
    if not replicas.number:
        return None, None
    tokens, samples = tokens_of(tables), samples_of(tables)
    of_all = replicas.number / (time.step_us * 1e-6) / world_size
    number, read = tokens.number * replicas.number, samples.number * replicas.number
    text = tokens_text(tokens, rank, replicas)
    return (
        RankThroughput(number, text, tokens.number * of_all) if number else None,
        SampleThroughput(read, samples.shape, samples.number * of_all) if read else None,
    )
