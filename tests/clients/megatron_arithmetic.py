"""The memory of a Megatron rank's parameters, by pencil and paper: from the flags alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """One mixture of experts with multi-latent or grouped-query attention, and its parallelism.

    ``latent`` is (q_lora, kv_lora, qk_head, qk_pos_emb_head, v_head), ``grouped`` (groups, channels).
    """

    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    experts: int
    expert_ffn: int
    world: int
    tp: int
    pp: int
    ep: int
    shared_ffn: int = 0
    latent: tuple[int, int, int, int, int] | None = None
    #: Whether tensor parallelism shards latent attention's down projections: megatron-core's own layers do.
    shards_down: bool = False
    grouped: tuple[int, int] | None = None

    def attention(self) -> int:
        """Parameters of the attention of one layer, with the norm before it."""
        if self.latent is not None:
            q_lora, kv_lora, head, position, value = self.latent
            down = self.hidden * (q_lora + kv_lora + position) // (self.tp if self.shards_down else 1)
            down += q_lora + kv_lora
            up = self.heads * (q_lora * (head + position) + kv_lora * (head + value)) // self.tp
            return self.hidden + down + up + self.heads * value * self.hidden // self.tp
        assert self.grouped is not None
        groups, channels = self.grouped
        qkv = (self.heads + 2 * groups) * channels * self.hidden
        return self.hidden + (qkv + self.heads * channels * self.hidden) // self.tp + 2 * channels

    def held(self, dense_layers: int, expert_layers: int, *, embedding: bool = False, output: bool = False) -> Held:
        """Parameters of a pipeline stage with so many layers."""
        dense = dense_layers * (self.attention() + self.hidden + 3 * self.hidden * self.ffn // self.tp)
        router, shared = self.experts * self.hidden, 3 * self.hidden * self.shared_ffn // self.tp
        dense += expert_layers * (self.attention() + self.hidden + router + shared)
        dense += (embedding + output) * self.vocabulary // self.tp * self.hidden + output * self.hidden
        local_experts = self.experts // self.ep * 3 * self.hidden * self.expert_ffn
        data_parallel = self.world // (self.tp * self.pp)
        expert_data_parallel = self.world // (self.pp * self.ep)
        return Held(dense, expert_layers * local_experts, data_parallel, expert_data_parallel)


@dataclass(frozen=True)
class Held:
    """Numbers of parameters, and over how many ranks their optimizer is spread."""

    dense: int
    experts: int
    data_parallel: int
    expert_data_parallel: int

    def bytes_by_category(self) -> dict[str, float]:
        """bfloat16 parameters, float32 gradients; of the optimizer two float32 moments and a float32 copy."""
        whole = self.dense + self.experts
        spread = self.dense / self.data_parallel + self.experts / self.expert_data_parallel
        return {"parameter": 2 * whole, "gradient": 4 * whole, "optimizer_state": 12 * spread}


MIXTRAL = Sizes(4096, 32, 14336, 32128, 8, 14336, 64, 1, 4, 8, grouped=(8, 128))
QWEN3 = Sizes(4096, 64, 12288, 33236, 128, 1536, 256, 2, 8, 32, grouped=(4, 64))
DEEPSEEK = Sizes(7168, 128, 18432, 32320, 256, 2048, 1024, 2, 16, 64, 2048, latent=(1536, 512, 128, 64, 128))
#: First, a middle and the last pipeline stage of the presets: name, rank, what they hold.
PRESETS = [
    ("mixtral-8x7b", 0, MIXTRAL.held(0, 8, embedding=True)),
    ("mixtral-8x7b", 32, MIXTRAL.held(0, 8)),
    ("mixtral-8x7b", 48, MIXTRAL.held(0, 8, output=True)),
    ("qwen3-235b", 0, QWEN3.held(0, 11, embedding=True)),
    ("qwen3-235b", 128, QWEN3.held(0, 12)),
    ("qwen3-235b", 224, QWEN3.held(0, 11, output=True)),
    ("deepseek-v3", 0, DEEPSEEK.held(3, 2, embedding=True)),
    ("deepseek-v3", 512, DEEPSEEK.held(0, 4)),
    ("deepseek-v3", 960, DEEPSEEK.held(0, 2, output=True)),
]
