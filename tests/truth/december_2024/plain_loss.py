"""The loss is not compiled: torchtitan 0.1.0 compiles it along with the model, earlier ones did not."""

from __future__ import annotations

import torchtitan.models.llama3  # noqa: F401  it registers what get_train_spec finds
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.protocols.train_spec import get_train_spec

get_train_spec("llama3").build_loss_fn = lambda job_config: cross_entropy_loss
