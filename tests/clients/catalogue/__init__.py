"""Every job of every framework that docs/clients.md speaks of: a module a framework, each with its ``ENTRIES``."""

from __future__ import annotations

from tests.clients.catalogue import (
    deepspeed,
    language,
    lightning,
    megatron,
    megatron_fsdp,
    projects,
    pytorch,
    pytorch_features,
    recipes,
    speedruns,
    torchtitan,
    transformers,
    tutorials,
    vision,
)
from tests.clients.catalogue.arithmetic import Arithmetic
from tests.clients.catalogue.entry import TRAINING, Entry, Refusal, version

__all__ = ["ENTRIES", "TRAINING", "Arithmetic", "Entry", "Refusal", "version"]

ENTRIES: tuple[Entry, ...] = (
    *pytorch.ENTRIES,
    *pytorch_features.ENTRIES,
    *tutorials.ENTRIES,
    *megatron.ENTRIES,
    *megatron_fsdp.ENTRIES,
    *deepspeed.ENTRIES,
    *transformers.ENTRIES,
    *torchtitan.ENTRIES,
    *speedruns.ENTRIES,
    *language.ENTRIES,
    *lightning.ENTRIES,
    *vision.ENTRIES,
    *recipes.ENTRIES,
    *projects.ENTRIES,
)
