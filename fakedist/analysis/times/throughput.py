"""How much of the job a rank's timed step does: tokens, and the FLOPs that frameworks count for a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

#: A backward pass takes twice the arithmetic of its forward.
_FORWARD_AND_BACKWARD = 3.0


@dataclass(frozen=True)
class StepTokens:
    """The tokens that a rank reads in the timed step.

    Attributes:
        number: How many; 0 if that is not known.
        num_micro_batches: Micro-batches; 0 if that is not known.
        why: Why it is not known.
    """

    number: int
    num_micro_batches: int
    why: str = ""


@dataclass(frozen=True)
class CountedFlops:
    """The FLOPs of a rank's step as frameworks count them: three times those of the forward pass, none computed twice.

    Attributes:
        megatron: Attention as if each query met half of the keys, as Megatron-LM counts it.
        torchtitan: Attention as if each query met all keys, as torchtitan counts it.
        num_lacking: Products and attention of the forward pass whose FLOPs are not known.
    """

    megatron: float
    torchtitan: float
    num_lacking: int


def tokens_of(launches: pd.DataFrame, work: pd.DataFrame) -> StepTokens:
    """Count the tokens of a step: what the model's first embedding looks up, once for each micro-batch.

    Args:
        launches: The table ``launches``.
        work: The table ``work``.
    """
    forward = _forward(launches)
    of_work = forward["work"].to_numpy("i8")
    looks_up = (work["operation"].astype(str) == "aten.embedding.default") & (work["m"] > 0)
    found = forward[looks_up.to_numpy(bool)[of_work]].drop_duplicates(["op", "layer"])
    if not len(found):
        return StepTokens(0, 0, "no embedding was seen in the forward pass")
    first = found.iloc[0]
    own = found[found["layer"] == first["layer"]]
    is_product = (work["family"].astype(str) == "gemm").to_numpy(bool)[of_work]
    after = forward[is_product & (forward.index > found.index[0])]
    if not len(after):
        return StepTokens(0, 0, "no product follows the embedding")
    # A model that embeds twice in one forward pass (multi-token prediction, encoder and decoder) runs the first product
    # after its embedding once for each micro-batch.
    same = after[(after["work"] == after["work"].iloc[0]) & (after["layer"] == after["layer"].iloc[0])]
    if _num_runs(same["op"]) != len(own):
        return StepTokens(0, 0, "the first embedding and the product after it do not run equally often")
    rows = work["m"].to_numpy("i8")[own["work"].to_numpy("i8")]
    return StepTokens(int(rows.sum()), len(own))


def _num_runs(operations: pd.Series) -> int:
    """How often a product ran, by the operation of each of its launches. Outside of one, each launch is a run.

    Transformer Engine launches its products from extensions of its own, where no torch operation runs.
    """
    inside = operations[operations >= 0]
    return int(inside.nunique()) + len(operations) - len(inside)


def flops_of(launches: pd.DataFrame, work: pd.DataFrame) -> CountedFlops:
    """Count the FLOPs of a step.

    Args:
        launches: The table ``launches``.
        work: The table ``work``.
    """
    counts = np.bincount(_forward(launches)["work"].to_numpy("i8"), minlength=len(work))
    family, flops = work["family"].astype(str).to_numpy(), work["flops"].to_numpy("f8")
    is_attention = (family == "attention") & (work["attention"].astype(str) == "forward").to_numpy(bool)
    is_product = family == "gemm"
    width, value_width = work["width"].to_numpy("f8"), work["value_width"].to_numpy("f8")
    widths = width + np.where(value_width > 0, value_width, width)
    every = (
        2.0 * np.prod([work[name].to_numpy("f8") for name in ("batch", "heads", "queries", "keys")], axis=0) * widths
    )
    of_attention = (family == "attention") & (flops != 0)  # kernels that prepare one have none
    lacks = (is_product & ~np.isfinite(flops)) | (of_attention & ~(is_attention & (every > 0)))
    products = float((np.where(is_product, np.nan_to_num(flops), 0.0) * counts).sum())
    attention = float((np.where(is_attention, every, 0.0) * counts).sum())
    return CountedFlops(
        megatron=_FORWARD_AND_BACKWARD * (products + attention / 2),
        torchtitan=_FORWARD_AND_BACKWARD * (products + attention),
        num_lacking=int(counts[lacks].sum()),
    )


def _forward(launches: pd.DataFrame) -> pd.DataFrame:
    is_forward = (launches["phase"].astype(str) == "forward") & ~launches["recompute"].astype(bool)
    return launches[is_forward & (launches["work"] >= 0)]
