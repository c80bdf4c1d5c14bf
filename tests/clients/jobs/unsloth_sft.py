"""After Unsloth's notebooks: FastLanguageModel, LoRA by its own kernels, gradients checkpointed, TRL's SFTTrainer.

Runs on GPUs too, under torchrun. It reads ``model/`` and ``texts.jsonl`` of ``prepared_llama.py``.
"""

from __future__ import annotations

import os

from unsloth import FastLanguageModel  # isort: skip: it patches what the others import

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train for some steps."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        "model",
        max_seq_length=512,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        device_map={"": int(os.environ["LOCAL_RANK"])},
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        random_state=3407,
    )
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files="texts.jsonl", split="train"),
        args=SFTConfig(
            output_dir="trained",
            max_steps=6,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            learning_rate=2e-4,
            logging_steps=1,
            optim="adamw_torch",
            bf16=True,
            report_to="none",
            save_strategy="no",
            max_length=512,
            ddp_find_unused_parameters=False,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
