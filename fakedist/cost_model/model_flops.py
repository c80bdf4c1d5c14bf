"""The model's FLOPs, from which MFU is computed: its matrix products and attention, forward and backward, each once.

They are the least that a step with this batch needs, whatever it runs besides: nothing that backward computes again
counts (checkpoints, what torch.compile drops, the scores of a fused attention), nor does an optimizer (Muon, Shampoo,
SOAP), an evaluation between training steps, or arithmetic outside of products. Layers that are not trained count with
what is computed of them: frozen weights have no gradients. A causal attention counts the keys that queries meet.

Megatron-LM and torchtitan count three forwards instead (:func:`fakedist.cost_model.job.job_times.flops_of`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fakedist.analysis.recording import Array
from fakedist.cost_model.busiest_rank import own_work

#: Families whose floating-point operations are the model's.
COUNTED = ("gemm", "attention")
_PASSES = ("generation", "forward", "backward")
#: Of five products of a fused attention's backward, one computes the scores again. With values as wide as keys:
_WITHOUT_SCORES = 4 / 5


@dataclass(frozen=True)
class ModelFlops:
    """A rank's FLOPs in a step, and how many products and attentions among them lack known ones."""

    flops: float
    num_lacking: int


def flops_of_launches(launches: pd.DataFrame, work: pd.DataFrame) -> ModelFlops:
    """Count a step by its launches and their work."""
    rows = launches[launches["work"] >= 0]
    of_work = rows["work"].to_numpy("i8")
    family = work["family"].astype(str)
    flops = own_work(work, "flops")
    width, value_width = (np.nan_to_num(work[name].to_numpy("f8")) for name in ("width", "value_width"))
    value_width = np.where(value_width > 0, value_width, width)
    is_backward = (family == "attention").to_numpy(bool) & (work["attention"].astype(str) == "backward").to_numpy(bool)
    once = np.where(is_backward & (width > 0), 1 - width / np.maximum(3 * width + 2 * value_width, 1), 1.0)
    return _counted(rows, family.to_numpy(str)[of_work], (flops * once)[of_work])


def flops_of_kernels(kernels: pd.DataFrame) -> ModelFlops:
    """Count a step by the kernels that a tool traced, in the order of the table ``kernels``."""
    family = kernels["family"].astype(str).to_numpy(str)
    is_backward = (family == "attention") & (kernels["phase"].astype(str) == "backward").to_numpy(bool)
    once = np.where(is_backward & ~kernels["recompute"].to_numpy(bool), _WITHOUT_SCORES, 1.0)
    return _counted(kernels, family, kernels["flops"].to_numpy("f8") * once)


def _counted(rows: pd.DataFrame, family: Array, flops: Array) -> ModelFlops:
    """The sum over rows with ``phase`` and ``recompute``, in the order in which they were launched."""
    phase = rows["phase"].astype(str).to_numpy(str)
    is_product = np.isin(family, COUNTED) & (flops != 0)
    is_models = np.isin(phase, _PASSES)
    if not (is_product & (phase == "forward")).any():
        # Forwards of functions, without a module, end with a backward. What follows may be a hand-written optimizer.
        backward = np.flatnonzero(phase == "backward")
        is_models |= (phase == "other") & (np.arange(len(rows)) < (backward[-1] if len(backward) else len(rows)))
    counts = is_product & is_models & ~rows["recompute"].to_numpy(bool)
    own = flops[counts]
    return ModelFlops(float(np.nansum(own)), int((~np.isfinite(own)).sum()))
