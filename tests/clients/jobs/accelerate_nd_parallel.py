"""After Accelerate's nd_parallel example: FSDP2, tensor and context parallelism by one ``ParallelismConfig``.

``accelerate_nd_parallel.py --dp-shard-size 4 --tp-size 2`` trains a Llama with random weights, saved first and loaded
as the example loads its own. Runs on GPUs too, under torchrun.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS, VOCABULARY = 6, 32_000


class Stories(Dataset[dict[str, torch.Tensor]]):
    """Packed sequences of random tokens, labels shifted by one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:], "labels": tokens[1:]}


def saved_model() -> Path:
    """A checkpoint of random weights in bf16, as the example's comes from the hub: four layers of 2048.

    Each rank has its own, and makes it before it joins the others: once it has, Transformers saves on the first alone.
    """
    directory = Path(f"model{os.environ.get('RANK', '0')}").absolute()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def forward(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
) -> torch.Tensor:
    """A step, its sequences split over the ranks of context parallelism; the mean loss of all that have other data."""
    length = batch["input_ids"].size(1)
    batch["position_ids"] = torch.arange(0, length, device=batch["input_ids"].device).unsqueeze(0)
    buffers = [batch["input_ids"], batch["shift_labels"], batch["labels"], batch["position_ids"]]
    parallel = accelerator.parallelism_config
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1, 1, 1, 1], no_restore_buffers=set(buffers)
    ):
        group = accelerator.torch_device_mesh["dp_cp"].get_group() if parallel.dp_cp_dim_names else None
        loss: torch.Tensor = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=group)
    return loss


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser()
    for name in ("dp-replicate", "dp-shard", "tp", "cp"):
        parser.add_argument(f"--{name}-size", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=1024)
    options = parser.parse_args()
    set_seed(42)
    saved = saved_model()
    parallel = ParallelismConfig(
        dp_replicate_size=options.dp_replicate_size,
        dp_shard_size=options.dp_shard_size,
        tp_size=options.tp_size,
        cp_size=options.cp_size,
    )
    plugin = None
    if parallel.dp_shard_enabled or parallel.cp_enabled:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            state_dict_type="SHARDED_STATE_DICT",
        )
    accelerator = Accelerator(mixed_precision="bf16", parallelism_config=parallel, fsdp_plugin=plugin)
    more: dict[str, Any] = {}
    if options.tp_size > 1:
        more = {"tp_size": options.tp_size, "tp_plan": "auto", "device_mesh": accelerator.torch_device_mesh}
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16, use_cache=False, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    loader = DataLoader(Stories(options.sequence_length), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        if step >= STEPS:
            break
        loss = forward(model, batch, optimizer, accelerator)
        accelerator.print(f"Step {step}/{STEPS}, Loss: {loss.item():.4f}")
    accelerator.print("Training completed!")
    accelerator.end_training()


if __name__ == "__main__":
    main()
