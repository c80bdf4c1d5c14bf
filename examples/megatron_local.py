"""The parts that megatron-core's own layers lack without Transformer Engine and Apex: its large jobs run with them.

These are norms under sequence parallelism, which megatron-core's wrapper of torch's norms refuses, and multi-latent
attention, whose keys and values differ in size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class TorchNorm:
    """A norm whose parameters are marked: their gradients are summed over the tensor parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
        """A torch.nn.RMSNorm or torch.nn.LayerNorm."""
        if config.layernorm_zero_centered_gamma or config.memory_efficient_layer_norm:
            raise SystemExit("--apply-layernorm-1p and --memory-efficient-layer-norm: need Transformer Engine or Apex")
        norm = (nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm)(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # as megatron-core's other norms have it
        return norm


class LatentAttention(DotProductAttention):
    """Attention over keys of one size and values of another."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels:  # megatron-core makes one without, and throws it away
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


# megatron-core 0.16.1 without Transformer Engine: attention takes it for installed, because its wrapper can be
# imported, and the router asks of a function that was not imported whether it is None.
multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
if not transformer_engine.HAVE_TE:
    moe_utils.te_general_gemm = None


def completed(spec: Any, config: TransformerConfig) -> Any:
    """A specification of layers with these in the places of megatron-core's."""
    if spec is WrappedTorchNorm:
        return TorchNorm
    if spec is DotProductAttention and config.multi_latent_attention:
        return LatentAttention
    if isinstance(spec, list):
        return [completed(each, config) for each in spec]
    if isinstance(spec, ModuleSpec):
        return dataclasses.replace(spec, submodules=completed(spec.submodules, config))
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        fields = {field.name: completed(getattr(spec, field.name), config) for field in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **fields)
    return spec
