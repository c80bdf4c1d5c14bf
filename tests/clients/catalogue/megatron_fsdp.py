"""Megatron-FSDP, on its own: megatron-core, whose configuration it prefers to its own, has not kept up with it."""

from __future__ import annotations

import os
from typing import Any

from tests.clients.catalogue.entry import Entry, Refusal
from tests.conftest import ROOT

_WITHOUT_CORE = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests/clients/without_megatron_core"), str(ROOT)))}
_NAME = "Megatron-FSDP"


def _entry(feature: str, *arguments: str, fast: tuple[int, ...] = (), **more: Any) -> Entry:
    return Entry(
        _NAME,
        feature,
        "examples/gpt_megatron_fsdp.py",
        package="megatron-fsdp",
        arguments=arguments,
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        **{"collectives": ("all_gather", "reduce_scatter"), "environment": _WITHOUT_CORE} | more,
    )


ENTRIES = (
    _entry("all-gather and reduce-scatter on one group, GPT of 6.9 B parameters", fast=(31,)),
    _entry("all-gather on a group of its own, so that both overlap", "--separate-groups", fast=(31,)),
    _entry("ZeRO-2: gradients and optimizer state sharded", "--strategy", "optim_grads"),
    _entry("ZeRO-1: optimizer state sharded", "--strategy", "optim"),
    Entry(
        _NAME,
        "in one environment with megatron-core 0.16.1",
        "examples/gpt_megatron_fsdp.py",
        package="megatron-fsdp",
        requires=("megatron-core",),
        world_size=64,
        refused=Refusal(
            "unexpected keyword argument 'fsdp_db_use_persist_buf_on_alloc_fail'",
            "where megatron-core is installed Megatron-FSDP takes its configuration class, and that of 0.16.1 lacks a "
            "field that 0.6.1 gives it; without megatron-core it runs as above",
        ),
    ),
)
