"""A rank's memory and FLOPs by pencil and paper: from the sizes of the job alone, never from a run."""

from __future__ import annotations

from dataclasses import dataclass

BF16, FP32 = 2, 4
#: cuBLAS's workspace of a stream on Hopper.
CUBLAS = 32 * 2**20


@dataclass(frozen=True)
class Arithmetic:
    """The figures of one rank by a job's sizes; None is not checked.

    Attributes:
        parameters: Bytes that parameters hold, at most at once, in the last step.
        gradients: Bytes of gradients, likewise.
        optimizer_states: Bytes of optimizer states, likewise.
        flops: Of the matrix products and attention of one step on this rank.
        peak: Bytes allocated at the peak.
        bytes_within: Relative difference that is still agreement, of the first three.
        flops_within: The same of the FLOPs.
        peak_within: The same of the peak.
        phases: Those that every step has, in the order in which they begin.
    """

    parameters: float | None = None
    gradients: float | None = None
    optimizer_states: float | None = None
    flops: float | None = None
    peak: float | None = None
    bytes_within: float = 0.001
    flops_within: float = 0.01
    peak_within: float = 0.1
    phases: tuple[str, ...] = ("forward", "backward", "optimizer")

    @property
    def named(self) -> tuple[str, ...]:
        names = ("parameters", "gradients", "optimizer_states", "flops", "peak")
        return tuple(name for name in names if getattr(self, name) is not None)


@dataclass(frozen=True)
class Transformer:
    """A decoder or encoder of equal layers, with as many heads of keys as the sizes say, and no biases.

    Attributes:
        layers: Number of layers.
        hidden: Width.
        ffn: Width inside of the feed-forward.
        vocabulary: Rows of the embedding.
        keys: Width of keys, and of values; that of the model unless queries share them.
        gated: Whether the feed-forward has three matrices instead of two.
        tied: Whether the output layer shares the embedding's weight.
        positions: Rows of a learned embedding of positions.
        biases: Whether linear layers and norms have biases, and norms two parameters a channel.
    """

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    keys: int = 0
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False

    @property
    def in_a_layer(self) -> int:
        """Elements of the matrices of a layer."""
        return 2 * self.hidden * (self.hidden + self.kv) + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def kv(self) -> int:
        return self.keys or self.hidden

    @property
    def matrices(self) -> int:
        """Elements that a token is multiplied with: layers and output layer."""
        return self.layers * self.in_a_layer + self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All of them: matrices, embeddings, two norms a layer and one at the end, biases."""
        embeddings = (0 if self.tied else self.vocabulary * self.hidden) + self.positions * self.hidden
        norms = (2 * self.layers + 1) * self.hidden * (2 if self.biases else 1)
        biases = self.layers * (2 * self.hidden + 2 * self.kv + self.ffn + self.hidden) if self.biases else 0
        return self.matrices + embeddings + norms + biases

    def flops(self, sequences: int, length: int, *, causal: bool = True, trained: float = 3) -> float:
        """Of forward and backward: 6 for each element and token, and attention, which computes again in backward.

        Attention multiplies twice in forward (QKᵀ, PV) and five times in backward, and half of it where it is causal.
        """
        scores = length * (length + 1) / 2 if causal else length * length
        return sequences * (6 * self.matrices * length + 14 * scores * self.hidden * self.layers)
