"""What torchtitan 0.1.0 on today's torch does otherwise than both did in December 2024; torchtitan imports it first.

torchtitan 0.1.0 compiles the loss along with the model. In December 2024 it did not. RMSNorm was not yet one kernel.
"""

from __future__ import annotations

import torchtitan.models.llama3  # noqa: F401  it registers what get_train_spec finds
from composite_norm import rms_norm
from torch import nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.protocols.train_spec import get_train_spec

get_train_spec("llama3").build_loss_fn = lambda job_config: cross_entropy_loss
nn.RMSNorm.forward = rms_norm
