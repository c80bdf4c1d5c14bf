"""The jobs that are recorded: what each is called, where it is, and what it needs. Imports no torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

_PARALLEL, _TRAINING, _PARTS = (f"{__name__}.{name}" for name in ("parallel", "training", "single_parts"))


#: Set in the environment of a profiled job.
PROFILED = "FAKEDIST_GPU_JOB_PROFILED"


@dataclass(frozen=True)
class GpuJob:
    """One job.

    Attributes:
        name: Its name on the command line and in recordings.
        module: The module that holds it.
        function: Its function, which takes ``argument`` where there is one.
        argument: What the function is called with; None for nothing.
        world_size: Ranks of its world; 0 where it uses no process group. One rank runs with torch's own NCCL on a real
            GPU; the other ranks of a larger world are faked on every device.
        environment: Variables that must be set before torch is imported.
        num_runs: How often it is run for a recording, which is of the last: a first compilation tunes kernels, which
            allocates.
    """

    name: str
    module: str
    function: str
    argument: str | None = None
    world_size: int = 0
    environment: tuple[tuple[str, str], ...] = ()
    num_runs: int = 1

    def run(self) -> None:
        """Run it in this process, which imports torch."""
        function = getattr(importlib.import_module(self.module), self.function)
        function() if self.argument is None else function(self.argument)


def _alloc_conf(text: str) -> tuple[tuple[str, str], ...]:
    return (("PYTORCH_CUDA_ALLOC_CONF", text),)


#: One thread for inductor's compilation: it starts workers otherwise, which take seconds.
_COMPILE = (("TORCHINDUCTOR_COMPILE_THREADS", "1"),)

JOBS: dict[str, GpuJob] = {
    job.name: job
    for job in (
        GpuJob("allocations", _PARTS, "allocations"),
        GpuJob("allocations_max_split", _PARTS, "allocations", environment=_alloc_conf("max_split_size_mb:32")),
        GpuJob("allocations_roundup", _PARTS, "allocations", environment=_alloc_conf(
            "roundup_power2_divisions:4")),
        GpuJob("out_of_memory", _PARTS, "out_of_memory"),
        GpuJob("streams", _PARTS, "streams"),
        GpuJob("expandable_segments", _TRAINING, "transformer", "default", environment=_alloc_conf(
            "expandable_segments:True")),
        GpuJob("allocations_expandable", _PARTS, "allocations", environment=_alloc_conf(
            "expandable_segments:True")),
        GpuJob("cuda_graphs", _PARTS, "cuda_graphs"),
        GpuJob("offload", _PARTS, "offload"),
        GpuJob("transformer_default", _TRAINING, "transformer", "default"),
        GpuJob("transformer_flash", _TRAINING, "transformer", "flash"),
        GpuJob("transformer_efficient", _TRAINING, "transformer", "efficient"),
        GpuJob("transformer_cudnn", _TRAINING, "transformer", "cudnn"),
        GpuJob("transformer_math", _TRAINING, "transformer", "math"),
        GpuJob("transformer_checkpoint", _TRAINING, "transformer_checkpoint"),
        GpuJob("transformer_fp32", _TRAINING, "transformer_fp32"),
        GpuJob("generation", _TRAINING, "generation"),
        GpuJob("amp_fp16", _TRAINING, "amp_fp16"),
        GpuJob("fp8", _TRAINING, "fp8"),
        GpuJob("compiled", _TRAINING, "compiled", environment=_COMPILE, num_runs=2),
        GpuJob("convnet", _PARTS, "convnet", "contiguous"),
        GpuJob("convnet_channels_last", _PARTS, "convnet", "channels_last"),
        GpuJob("lstm", _PARTS, "lstm"),
        GpuJob("matmuls", _PARTS, "matmuls"),
        GpuJob("sorts_and_scans", _PARTS, "sorts_and_scans"),
        GpuJob("sizes_by_values", _PARTS, "sizes_by_values"),
        GpuJob("subclass_shortcuts", _PARTS, "subclass_shortcuts"),
        GpuJob("reductions", _PARTS, "reductions"),
        GpuJob("optimizers", _PARTS, "optimizers"),
        GpuJob("moe_capacity", _TRAINING, "capacity"),
        GpuJob("moe_dropless", _TRAINING, "dropless"),
        GpuJob("ddp_1", _PARALLEL, "ddp", world_size=1),
        GpuJob("ddp_8", _PARALLEL, "ddp", world_size=8),
        GpuJob("fsdp2_1", _PARALLEL, "fsdp2", world_size=1),
        GpuJob("fsdp2_8", _PARALLEL, "fsdp2", world_size=8),
        GpuJob("fsdp2_tp_8", _PARALLEL, "fsdp2_tp", world_size=8),
    )
}  # fmt: skip
#: GiB of the first trial of the job that grows (scripts/measures.py); without a limit it takes 16.
MOST_GIB = 12
