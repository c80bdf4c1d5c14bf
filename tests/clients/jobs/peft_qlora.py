"""After PEFT's and TRL's QLoRA: ``peft_qlora.py``, a Llama in 4 bits of bitsandbytes, LoRA on all its linear layers.

``--bits 16`` is LoRA on the model in bf16. Runs on GPUs too, under torchrun. The model has random weights, saved first
and loaded quantized, as the recipe loads its own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers_clm import conversations, tokenizer
from trl import SFTConfig, SFTTrainer


def saved_model() -> Path:
    """A checkpoint of random weights in bf16: four layers of 2048. Each rank has its own."""
    directory = Path(f"model{os.environ.get('RANK', '0')}").absolute()
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, choices=[4, 16], default=4)
    parser.add_argument("--optim", default="paged_adamw_8bit")
    options = parser.parse_args()
    more: dict[str, Any] = {}
    if options.bits == 4:
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        )
    model = AutoModelForCausalLM.from_pretrained(
        saved_model(), dtype=torch.bfloat16, device_map={"": int(os.environ.get("LOCAL_RANK", "0"))}, **more
    )
    if options.bits == 4:
        model = prepare_model_for_kbit_training(model)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="trained",
            max_steps=6,
            per_device_train_batch_size=2,
            bf16=True,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            max_length=512,
            optim=options.optim,
        ),
        train_dataset=conversations(2000),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    trainer.model.print_trainable_parameters()
    trainer.train()


if __name__ == "__main__":
    main()
