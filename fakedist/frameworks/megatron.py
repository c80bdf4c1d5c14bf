"""Megatron-LM and Megatron Core: attributes that they set on a parameter."""

from __future__ import annotations

#: Its gradient, in the buffer that Megatron's DistributedDataParallel reduces.
GRADIENT = "main_grad"
#: The fp32 tensor, or this rank's part of it, that the optimizer updates in the parameter's place.
MASTER = "main_param"
