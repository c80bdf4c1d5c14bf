"""Train a Hugging Face model with random weights: ``transformers_train.py --model llama --loop trainer --shard fsdp2``.

With ``--loop trainer`` it is Transformers' Trainer, with ``--loop accelerate`` a loop of one's own under Accelerate.
Runs as it is on GPUs too, started by torchrun or accelerate launch.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)

TOKENS, BATCH, LAYERS = 512, 2, 4
SIZES = {"vocab_size": 8192, "hidden_size": 1024, "num_hidden_layers": LAYERS, "max_position_embeddings": 2048}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
MODELS = {
    "llama": lambda: LlamaConfig(intermediate_size=2816, **SIZES, **HEADS),
    "mixtral": lambda: MixtralConfig(intermediate_size=1408, num_local_experts=8, **SIZES, **HEADS),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512, intermediate_size=2816, **SIZES, **HEADS
    ),
}
BLOCKS = {"llama": "LlamaDecoderLayer", "mixtral": "MixtralDecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer"}


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(8192, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def deepspeed_config(stage: int, accumulate: int) -> dict[str, Any]:
    """A ds_config.json of that ZeRO stage, with torch's optimizer."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000_000},
    }


def train_with_trainer(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """Transformers' own loop."""
    more: dict[str, Any] = {}
    if options.shard.startswith("fsdp"):
        version = int(options.shard[-1])
        more["fsdp"] = True
        more["fsdp_config"] = {"version": version, "transformer_layer_cls_to_wrap": [BLOCKS[options.model]]}
    elif options.shard.startswith("zero"):
        more["deepspeed"] = deepspeed_config(int(options.shard[-1]), options.accumulate)
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=options.accumulate,
        bf16=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        optim="adamw_torch",
        dataloader_num_workers=0,
        **more,
    )
    Trainer(model=model, args=arguments, train_dataset=Texts()).train()


def train_with_accelerate(model: PreTrainedModel, options: argparse.Namespace) -> None:
    """A loop as Accelerate's documentation writes it."""
    more: dict[str, Any] = {}
    if options.shard.startswith("fsdp"):
        version = int(options.shard[-1])
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            # As `accelerate config` sets it. Else FSDP1 trains flat parameters, which the optimizer does not have.
            use_orig_params=True if version == 1 else None,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[BLOCKS[options.model]],
        )
    elif options.shard.startswith("zero"):
        config = deepspeed_config(int(options.shard[-1]), options.accumulate)
        more["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=options.accumulate, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Texts(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            accelerator.print(f"step {steps} loss {loss.item():.2f}")
        if steps == options.steps:
            break
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), default="llama")
    parser.add_argument("--loop", choices=["trainer", "accelerate"], default="trainer")
    parser.add_argument("--shard", choices=["ddp", "fsdp1", "fsdp2", "zero2", "zero3"], default="ddp")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--local_rank", type=int, help="what the deepspeed launcher gives to every script")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_config(MODELS[options.model]())
    (train_with_trainer if options.loop == "trainer" else train_with_accelerate)(model, options)


if __name__ == "__main__":
    main()
