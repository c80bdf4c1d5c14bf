"""A configuration for torchtitan's ``--module llama3_bf16 --config llama3_405b``: its own 405B, in bf16.

torchtitan's ``llama3_405b`` asks for Float8 of torchao and for asynchronous tensor parallelism; everything else here is
as it stands there (torchtitan 0.3.0).
"""

from __future__ import annotations

from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_70b
from torchtitan.trainer import Trainer


def llama3_405b() -> Trainer.Config:
    config = llama3_70b()
    config.model_spec = model_registry("405B")
    config.optimizer = default_adamw(lr=8e-5)
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=600)
    config.training.local_batch_size = 2
    config.compile = CompileConfig(enable=True)
    return config
