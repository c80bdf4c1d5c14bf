"""PyTorch's tutorials on distributed training and its example minGPT-ddp, each on three of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.clients.catalogue.arithmetic import CUBLAS, FP32, Arithmetic, Transformer
from tests.clients.catalogue.entry import Entry

_FRAMEWORK = "PyTorch's tutorials"
_JOBS = "tests/clients/jobs/tutorial_"
_RANKS = (0, 3, 7)


def _linear(rank: int) -> Arithmetic:
    """A Linear(20, 1) and batches of 32; no gradient of the input, no state."""
    return Arithmetic(21 * FP32, 21 * FP32, 0, flops=4 * 20 * 32, peak=CUBLAS)


def _digits(rank: int) -> Arithmetic:
    """Two convolutions and two linear layers, 128 / 8 pictures; the first convolution's input has no gradient."""
    parameters = (25 * 10 + 10) + (250 * 20 + 20) + (320 * 50 + 50) + (50 * 10 + 10)
    convolutions = 4 * 24 * 24 * 250 + 6 * 8 * 8 * 5000
    flops = 16 * (convolutions + 6 * (320 * 50 + 50 * 10))
    return Arithmetic(parameters * FP32, parameters * FP32, parameters * FP32, flops=flops)


def _mingpt(rank: int) -> Arithmetic:
    """8 layers of 512, one more projection behind torch's attention, which keeps its scores: 2 products, then 4."""
    model = Transformer(8, 512, 2048, 100, gated=False, positions=128, biases=True)
    projections = 8 * 512 * 512
    held = FP32 * (model.parameters + projections + 8 * 512)
    masks = FP32 * 8 * 128 * 128  # buffers count with parameters
    matrices = 6 * (model.matrices + projections) * 128
    return Arithmetic(held + masks, held, 2 * held, flops=216 * (matrices + 12 * 128 * 128 * 512 * 8))


def _stage(rank: int) -> Arithmetic:
    """A decoder layer a stage: two attentions, two matrices of 2048, three norms; the ends have more."""
    layer = 2 * 4 * 512 * 512 + 2 * 512 * 2048
    held = layer + 2 * 4 * 512 + 2048 + 512 + 3 * 2 * 512
    output = 10_000 * 512 if rank == 7 else 0
    held += output + 10_000 + 2 * 512 if rank == 7 else 10_000 * 512 if rank == 0 else 0
    held *= FP32
    return Arithmetic(held, held, 2 * held, flops=6 * (layer + output) * 32 * 500, phases=("forward", "backward"))


def _toy(rank: int) -> Arithmetic:
    """Two matrices of 1024 x 4096 over 8 ranks, gathered at once; the first one's input has no gradient."""
    matrix = 1024 * 4096
    whole = FP32 * (2 * matrix + 4096 + 1024)
    peak = CUBLAS + (1 + 1 / 8 + 1 + 2 / 8) * whole
    return Arithmetic(whole + whole / 8, whole, 2 * whole / 8, flops=8 * (4 + 6) * matrix, peak=peak)


def _tensor_parallel(rank: int) -> Arithmetic:
    """256 to 1024 to 256 over 8 ranks, 20 rows: halves of an MLP, and the second one's whole bias."""
    matrix = 256 * 1024 // 8
    held = FP32 * (2 * matrix + 1024 // 8 + 256)
    return Arithmetic(held, held, 2 * held, flops=20 * (4 + 6) * matrix)


def _sequence_parallel(rank: int) -> Arithmetic:
    """The same weights; the rows of all 8 ranks meet in the products."""
    return replace(_tensor_parallel(rank), flops=8 * 20 * (4 + 6) * 256 * 1024 // 8)


def _words(tp: int, rows: int, ranks: int) -> Arithmetic:
    """Two residual MLPs of 256 and 1024, embedding and output of 1024 words, 64 tokens a row; a part of the states."""
    matrix = 256 * 1024 // tp
    elements = 6 * matrix + 2 * (2 * 256 + 1024 // tp + 256) + 2 * 256
    return Arithmetic(optimizer_states=2 * FP32 * elements / ranks, flops=6 * 5 * matrix * rows * 64)


def _mesh(feature: str, tutorial: str, arithmetic: Callable[[int], Arithmetic], *collectives: str) -> Entry:
    """One that leaves its device to ``init_device_mesh`` or to the group."""
    return Entry(
        _FRAMEWORK,
        feature,
        "tests/clients/jobs/tutorial_device_mesh.py",
        arguments=(tutorial,),
        ranks=(0, 4, 7),
        collectives=collectives,
        prints=("DEVICE {local_rank}",),
        arithmetic=arithmetic,
    )


ENTRIES = (
    _mesh("tensor parallelism", "tensor-parallel", _tensor_parallel, "all_reduce"),
    _mesh("sequence parallelism", "sequence-parallel", _sequence_parallel, "all_gather", "reduce_scatter"),
    _mesh("FSDP and tensor parallelism", "fsdp-tp", lambda rank: _words(2, 8, 4), "all_gather", "reduce_scatter"),
    _mesh("FSDP2, parameters made on the meta device", "fsdp2", lambda rank: _words(1, 32, 8), "all_gather"),
    Entry(
        _FRAMEWORK,
        "DDP series, fault-tolerant training with torchrun: an epoch and its snapshot",
        f"{_JOBS}multigpu_torchrun.py",
        arguments=("50", "1"),
        ranks=_RANKS,
        steps=12,  # an epoch has 8
        categories=("parameter", "gradient"),
        collectives=("all_reduce", "broadcast"),
        arithmetic=_linear,
    ),
    Entry(
        _FRAMEWORK,
        "minGPT-ddp: mixed precision, GradScaler",
        f"{_JOBS}mingpt_ddp.py",
        world_size=64,
        ranks=(0, 31, 63),
        fast=(31,),
        collectives=("all_reduce", "broadcast"),
        arithmetic=_mingpt,
    ),
    Entry(
        _FRAMEWORK,
        "writing distributed applications: gradients averaged by hand",
        f"{_JOBS}all_reduce.py",
        ranks=_RANKS,
        collectives=("all_reduce",),
        arithmetic=_digits,
    ),
    Entry(
        _FRAMEWORK,
        "pipeline parallelism: a transformer split by hand, GPipe",
        f"{_JOBS}pipelining.py",
        ranks=(0, 1, 4, 7),
        collectives=("send", "recv"),
        arithmetic=_stage,
    ),
    *(
        Entry(
            _FRAMEWORK,
            feature,
            f"{_JOBS}checkpoint.py",
            arguments=(mode,),
            ranks=_RANKS,
            steps=3,
            collectives=("all_gather", "reduce_scatter"),
            arithmetic=_toy,
            prints=("checkpoint 1 begun",),
        )
        for feature, mode in (
            ("distributed checkpoint", "save"),
            ("asynchronous checkpoint", "async"),
            ("asynchronous checkpoint, staged in pinned memory", "pinned"),
        )
    ),
)
