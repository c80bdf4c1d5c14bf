"""PyTorch feature by feature: small models, a job each."""

from __future__ import annotations

from dataclasses import replace

from tests.clients.catalogue.entry import TRAINING, Entry

_RANKS = (0, 3, 7)


def _replicated(feature: str, name: str, *collectives: str, fast: bool = False) -> Entry:
    return Entry(
        "PyTorch",
        feature,
        "tests/clients/jobs/pytorch_replicated.py",
        arguments=(name,),
        ranks=_RANKS,
        fast=(7,) if fast else (),
        collectives=collectives,
    )


def _sharded(feature: str, name: str, *collectives: str, fast: bool = False) -> Entry:
    return Entry(
        "PyTorch",
        feature,
        "tests/clients/jobs/pytorch_sharded.py",
        arguments=(name,),
        ranks=_RANKS,
        fast=(7,) if fast else (),
        collectives=collectives,
    )


def _pipeline(feature: str, *arguments: str, fast: bool = False) -> Entry:
    return Entry(
        "PyTorch",
        feature,
        "tests/clients/jobs/pytorch_pipeline.py",
        arguments=arguments,
        world_size=4,
        ranks=(0, 1, 2, 3),
        fast=(3,) if fast else (),
        collectives=("send", "recv"),
    )


def _inferred(feature: str, schedule: str) -> Entry:
    """Stages that learn their shapes from those before them: all ranks by one command, some of them twice."""
    return replace(_pipeline(feature, schedule), together=True)


ENTRIES = (
    _replicated("DDP, gradients in bf16 by a communication hook", "hooks", "all_reduce"),
    _replicated("DDP, PowerSGD", "power_sgd", "all_reduce"),
    _replicated("DDP, static graph, gradients in the buckets", "static_graph", "all_reduce"),
    _replicated("DDP, unused parameters", "unused_parameters", "all_reduce"),
    _replicated("DDP, no_sync", "no_sync", "all_reduce"),
    _replicated("DDP, Join", "join", "all_reduce"),
    _replicated("DDP, SyncBatchNorm", "sync_batch_norm", "all_gather", "all_reduce"),
    _replicated("ZeroRedundancyOptimizer", "zero", "all_reduce", "broadcast", fast=True),
    _replicated("ZeroRedundancyOptimizer, parameters in one bucket", "zero_overlapped", "all_reduce", "broadcast"),
    _replicated("torch.distributed.nn", "functional", "all_gather", "all_to_all", "broadcast"),
    _sharded("FSDP1", "fsdp1", "all_gather", "reduce_scatter"),
    _sharded("FSDP1, hybrid sharding", "hsdp1", "all_gather", "reduce_scatter", "all_reduce"),
    _sharded("FSDP2, mixed precision", "fsdp2", "all_gather", "reduce_scatter"),
    replace(
        _sharded("FSDP2, offload to the host", "fsdp2_offload", "all_gather", "reduce_scatter"),
        categories=("activation", "communication"),
    ),
    _sharded("FSDP2, hybrid sharding", "hsdp", "all_gather", "reduce_scatter", "all_reduce"),
    _sharded("tensor parallelism, loss in parallel", "tensor_parallel", "all_reduce"),
    _sharded("tensor and sequence parallelism", "sequence_parallel", "all_gather", "reduce_scatter"),
    _sharded("tensor and sequence parallelism with FSDP2", "tensor_and_sharded", "all_gather", "reduce_scatter"),
    _sharded("context parallelism", "context_parallel", "all_to_all", fast=True),
    replace(  # a parameter of no module
        _sharded("DTensor, redistributed and gathered", "distributed_tensors", "all_gather"),
        categories=("gradient", "optimizer_state"),
    ),
    _pipeline("pipelining: GPipe, shapes told", "gpipe", "static"),
    _pipeline("pipelining: 1F1B, shapes told", "1f1b", "static"),
    _pipeline("pipelining: interleaved 1F1B, shapes told", "interleaved", "static"),
    _pipeline("pipelining: interleaved zero bubble, shapes told", "interleaved_zero_bubble", "static"),
    _pipeline("pipelining: zero bubble in a V, shapes told", "zero_bubble_v", "static", fast=True),
    _pipeline("pipelining: DualPipeV, shapes told", "dual_pipe_v", "static"),
    _inferred("pipelining: GPipe, shapes told by the stage before", "gpipe"),
    _inferred("pipelining: 1F1B, shapes told by the stage before", "1f1b"),
    _inferred("pipelining: interleaved 1F1B, shapes told by the stage before", "interleaved"),
    _inferred("pipelining: interleaved zero bubble, shapes told by the stage before", "interleaved_zero_bubble"),
    _inferred("pipelining: zero bubble in a V, shapes told by the stage before", "zero_bubble_v"),
    _inferred("pipelining: DualPipeV, shapes told by the stage before", "dual_pipe_v"),
    Entry(
        "PyTorch",
        "distributed checkpoint, saved and loaded",
        "tests/clients/jobs/pytorch_checkpoint.py",
        arguments=("checkpoint",),
        ranks=_RANKS,
        fast=(7,),
        steps=1,  # one optimizer and then another's: a step ends when the first one steps again
        categories=TRAINING,
        collectives=("gather_object", "scatter_object_list", "broadcast_object_list"),
        prints=("LOADED 7 True True",),
    ),
    Entry(
        "PyTorch",
        "asynchronous tensor parallelism: symmetric memory, torch.compile",
        "tests/clients/jobs/pytorch_symmetric.py",
        categories=("parameter", "gradient", "optimizer_state", "activation"),
        collectives=("get", "symm_mem_barrier"),
    ),
)
