"""Megatron-FSDP, on its own: megatron-core, whose configuration it prefers to its own, has not kept up with it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from tests.clients.catalogue.entry import Entry, Refusal
from tests.conftest import ROOT

_WITHOUT_CORE = {"PYTHONPATH": os.pathsep.join((str(ROOT / "tests/clients/without_megatron_core"), str(ROOT)))}
_NAME = "Megatron-FSDP"
_HYBRID = ("all_gather", "reduce_scatter", "all_reduce")
_GPT, _FEATURES = "examples/gpt_megatron_fsdp.py", "tests/clients/jobs/megatron_fsdp_features.py"


def _entry(feature: str, *arguments: str, script: str = _GPT, fast: tuple[int, ...] = (), **more: Any) -> Entry:
    return Entry(
        _NAME,
        feature,
        script,
        package="megatron-fsdp",
        arguments=arguments,
        world_size=64,
        ranks=(0, 31, 63),
        fast=fast,
        **{"collectives": ("all_gather", "reduce_scatter"), "environment": _WITHOUT_CORE} | more,
    )


def _feature(feature: str, arguments: str, **more: Any) -> Entry:
    return _entry(feature, *arguments.split(), script=_FEATURES, **more)


def _engine(feature: str, recipe: str, **more: Any) -> Entry:
    """Transformer Engine's layers."""
    arguments = f"--recipe {recipe}"
    return _feature(f"Transformer Engine: {feature}", arguments, requires=("transformer-engine-torch",), **more)


def _checkpoint(feature: str, arguments: str = "", **more: Any) -> Entry:
    """A model so small that the virtual GPU computes its values: what is loaded is compared with what was saved."""
    return replace(
        _feature(f"distributed checkpoint: {feature}", f"--hidden 128 --checkpoint checkpoint {arguments}", **more),
        world_size=8,
        ranks=(0, 3, 7),
        prints=("parts as they were",),
    )


ENTRIES = (
    _entry("all-gather and reduce-scatter on one group, GPT of 6.9 B parameters", fast=(31,)),
    _entry("all-gather on a group of its own, so that both overlap", "--separate-groups", fast=(31,)),
    _entry("ZeRO-2: gradients and optimizer state sharded", "--strategy", "optim_grads"),
    _entry("ZeRO-1: optimizer state sharded", "--strategy", "optim"),
    _feature("nothing sharded: gradients all-reduced", "--strategy no_shard", collectives=("all_reduce",)),
    _feature("model made on the meta device", "--meta"),
    _feature("units gathered into two buffers that stay", "--double-buffer"),
    _feature("ZeRO-1, 3 micro-batches", "--strategy optim --accumulate 3"),
    _feature("hybrid sharding: 4 replicas of 16 shards", "--replicas 4", collectives=_HYBRID),
    _feature("hybrid sharding, 3 micro-batches", "--replicas 4 --accumulate 3", collectives=_HYBRID),
    _feature("hybrid sharding, optimizer sharded over replicas too", "--replicas 4 --outer optim"),
    _checkpoint("saved and loaded", fast=(0,)),
    _checkpoint("hybrid sharding, optimizer sharded over replicas too", "--replicas 2 --outer optim"),
    _engine("layers in bf16", "bf16"),
    _engine("weights in fp8, delayed scaling", "delayed --quantized"),
    _engine("weights in fp8, current scaling", "current --quantized"),
    _engine("weights in fp8, blockwise", "blockwise --quantized"),
    _engine("weights in MXFP8, on B200", "mxfp8 --quantized", options=("--gpu", "b200")),
    _engine(
        "weights in MXFP8, on H100",
        "mxfp8 --quantized",
        refused=Refusal(
            "Device compute capability 10.0 or higher required for MXFP8 execution",
            "Transformer Engine has MXFP8 from Blackwell on",
        ),
    ),
    _engine(
        "weights in fp8, hybrid sharding, made on the meta device",
        "delayed --quantized --replicas 4 --outer optim --meta",
    ),
    Entry(
        _NAME,
        "in one environment with megatron-core 0.16.1",
        _GPT,
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
