"""Small scripts that train GPT-2 fast: nanoGPT, and what the speedruns made of it."""

from __future__ import annotations

from tests.clients.catalogue.arithmetic import BF16, FP32, Arithmetic, Transformer
from tests.clients.catalogue.entry import Entry


def _nanogpt(rank: int) -> Arithmetic:
    """Four layers of GPT-2 without biases, 40 / 8 micro-batches of 4 sequences of 1024; the output layer is tied."""
    model = Transformer(4, 768, 3072, 50_304, gated=False, tied=True, positions=1024)
    held = FP32 * model.parameters
    return Arithmetic(held, held, 2 * held, flops=5 * model.flops(4, 1024))


def _speedrun(rank: int) -> Arithmetic:
    """Four layers of 512 on 8192 tokens, an output layer in fp8, Muon's five iterations on a matrix of each shape.

    FlexAttention counts every key: what its mask leaves out is not known. Matrices of a layer are fp32 and Muon's: the
    first four ranks have one of each shape; the embedding is bf16, and AdamW's like the output layer.
    """
    width, words, layers = 512, 50_304, 4
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    matrices = layers * sum(rows * columns for rows, columns in shapes)
    held = BF16 * words * width + FP32 * (words * width + matrices)
    has_own = rank < layers
    states = 2 * (BF16 + FP32) * words * width + has_own * FP32 * matrices / layers
    muon = sum(5 * (4 * width**2 * rows * columns / width + 2 * width**3) for rows, columns in shapes)
    attention = 14 * 8192 * 8192 * width * layers
    flops = 6 * 8192 * (matrices + words * width) + attention + has_own * muon
    return Arithmetic(held, held, states, flops=flops)


ENTRIES = (
    Entry(
        "nanoGPT",
        "compiled, DDP, gradient accumulation, evaluation before the first step",
        "tests/clients/jobs/nanogpt_train.py",
        arguments=("--n_layer=4",),
        ranks=(0, 3, 7),
        collectives=("all_reduce", "broadcast"),
        arithmetic=_nanogpt,
        minutes=10,
    ),
    Entry(
        "Speedrun of nanoGPT",
        "compiled, FlexAttention, Muon with asynchronous collectives, output layer in fp8",
        "tests/clients/jobs/speedrun.py",
        ranks=(0, 3, 7),
        collectives=("all_reduce", "reduce_scatter", "all_gather"),
        arithmetic=_speedrun,
        minutes=10,
    ),
)
