"""The jobs that are recorded: what each is called, where it is, and what it needs. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

_DENSE, _PARALLEL, _KERNELS = (
    "fakedist.extras.confirm.jobs.dense",
    "fakedist.extras.confirm.jobs.parallel",
    "fakedist.extras.confirm.jobs.library_kernels",
)
_MEMORY, _EXPERTS = "fakedist.extras.confirm.jobs.memory", "fakedist.extras.confirm.jobs.experts"


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


def _alloc_conf(text: str) -> tuple[tuple[str, str], ...]:
    return (("PYTORCH_CUDA_ALLOC_CONF", text),)


#: One thread for inductor's compilation: it starts workers otherwise, which take seconds.
_COMPILE = (("TORCHINDUCTOR_COMPILE_THREADS", "1"),)

JOBS: dict[str, GpuJob] = {
    job.name: job
    for job in (
        GpuJob("allocations", _MEMORY, "allocations"),
        GpuJob("allocations_max_split", _MEMORY, "allocations", environment=_alloc_conf("max_split_size_mb:32")),
        GpuJob("allocations_roundup", _MEMORY, "allocations", environment=_alloc_conf("roundup_power2_divisions:4")),
        GpuJob("out_of_memory", _MEMORY, "out_of_memory"),
        GpuJob("streams", _MEMORY, "streams"),
        GpuJob("expandable_segments", _DENSE, "transformer", "default", environment=_alloc_conf(
            "expandable_segments:True")),
        GpuJob("allocations_expandable", _MEMORY, "allocations", environment=_alloc_conf("expandable_segments:True")),
        GpuJob("cuda_graphs", _MEMORY, "cuda_graphs"),
        GpuJob("offload", _MEMORY, "offload"),
        GpuJob("transformer_default", _DENSE, "transformer", "default"),
        GpuJob("transformer_flash", _DENSE, "transformer", "flash"),
        GpuJob("transformer_efficient", _DENSE, "transformer", "efficient"),
        GpuJob("transformer_cudnn", _DENSE, "transformer", "cudnn"),
        GpuJob("transformer_math", _DENSE, "transformer", "math"),
        GpuJob("transformer_checkpoint", _DENSE, "transformer_checkpoint"),
        GpuJob("transformer_fp32", _DENSE, "transformer_fp32"),
        GpuJob("generation", _DENSE, "generation"),
        GpuJob("amp_fp16", _DENSE, "amp_fp16"),
        GpuJob("fp8", _DENSE, "fp8"),
        GpuJob("compiled", _DENSE, "compiled", environment=_COMPILE, num_runs=2),
        GpuJob("convnet", _KERNELS, "convnet", "contiguous"),
        GpuJob("convnet_channels_last", _KERNELS, "convnet", "channels_last"),
        GpuJob("lstm", _KERNELS, "lstm"),
        GpuJob("matmuls", _KERNELS, "matmuls"),
        GpuJob("sorts_and_scans", _KERNELS, "sorts_and_scans"),
        GpuJob("sizes_by_values", _KERNELS, "sizes_by_values"),
        GpuJob("subclass_shortcuts", _KERNELS, "subclass_shortcuts"),
        GpuJob("reductions", _KERNELS, "reductions"),
        GpuJob("optimizers", _KERNELS, "optimizers"),
        GpuJob("moe_capacity", _EXPERTS, "capacity"),
        GpuJob("moe_dropless", _EXPERTS, "dropless"),
        GpuJob("ddp_1", _PARALLEL, "ddp", world_size=1),
        GpuJob("ddp_8", _PARALLEL, "ddp", world_size=8),
        GpuJob("fsdp2_1", _PARALLEL, "fsdp2", world_size=1),
        GpuJob("fsdp2_8", _PARALLEL, "fsdp2", world_size=8),
        GpuJob("fsdp2_tp_8", _PARALLEL, "fsdp2_tp", world_size=8),
    )
}  # fmt: skip
