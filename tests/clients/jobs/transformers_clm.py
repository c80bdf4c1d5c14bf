"""After Transformers' run_clm: a configuration, texts of its own, tokens in blocks, the Trainer, evaluation.

``transformers_clm.py --shard ddp --trainer trainer`` is causal language modelling as ``run_clm.py`` does it;
``--trainer sft`` is TRL's SFTTrainer over conversations, with ``--lora`` through PEFT; ``--liger`` takes Liger's
kernels. Runs on GPUs too, under torchrun. Nothing is downloaded: the tokenizer is made on the spot.
"""

from __future__ import annotations

import argparse
import os
from itertools import chain
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

BLOCK, BATCH, VOCABULARY = 512, 2, 8192
HIDDEN, FFN, LAYERS, HEADS, KEY_HEADS = 1024, 2816, 4, 16, 4
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<user> {{ message.content }}{% endif %}"
    "{% if message.role == 'assistant' %}<assistant> "
    "{% generation %}{{ message.content }} </s>{% endgeneration %}{% endif %}"
    "{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<unk>", "<s>", "</s>", "<pad>", "<user>", "<assistant>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{n}" for n in range(VOCABULARY - 6))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    )


def texts(number: int) -> Dataset:
    """Sentences of words."""
    return Dataset.from_dict({"text": [" ".join(f"w{(n * 7 + k) % 8000}" for k in range(400)) for n in range(number)]})


def conversations(number: int) -> Dataset:
    """A question and an answer of 300 words each."""
    return Dataset.from_dict(
        {
            "messages": [
                [
                    {"role": role, "content": " ".join(f"w{(n * 7 + k) % 8000}" for k in range(300))}
                    for role in ("user", "assistant")
                ]
                for n in range(number)
            ]
        }
    )


def blocks(raw: Dataset, words: PreTrainedTokenizerFast) -> Dataset:
    """Texts one behind the other, cut into blocks, as run_clm groups them."""

    def group_texts(examples: dict[str, Any]) -> dict[str, Any]:
        joined = {key: list(chain(*examples[key])) for key in examples}
        total = len(joined["input_ids"]) // BLOCK * BLOCK
        result = {key: [ids[i : i + BLOCK] for i in range(0, total, BLOCK)] for key, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    tokenized = raw.map(lambda examples: words(examples["text"]), batched=True, remove_columns=["text"])
    return tokenized.map(group_texts, batched=True)


def model_of(options: argparse.Namespace) -> PreTrainedModel:
    """A Llama with random weights; Liger's layers and its fused linear cross entropy where asked for."""
    if options.liger and options.trainer == "clm":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    return AutoModelForCausalLM.from_config(config)


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of both trainers."""
    more: dict[str, Any] = {}
    if options.shard == "fsdp":
        more = {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    if options.context > 1:
        from accelerate.parallelism_config import ParallelismConfig

        shards = int(os.environ["WORLD_SIZE"]) // options.context
        more["parallelism_config"] = ParallelismConfig(cp_size=options.context, dp_shard_size=shards)
    return {
        "output_dir": "trained",
        "max_steps": 6,
        "per_device_train_batch_size": BATCH,
        "bf16": True,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "dataloader_num_workers": 0,
        "gradient_checkpointing": options.checkpoint,
        **more,
    }


def train_clm(options: argparse.Namespace) -> None:
    """As run_clm.py."""
    words, model = tokenizer(), model_of(options)
    train, held_out = blocks(texts(2000), words), blocks(texts(40), words)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**arguments_of(options), do_eval=True),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=words,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.log_metrics("eval", trainer.evaluate())


def train_sft(options: argparse.Namespace) -> None:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM") if options.lora else None
    trainer = SFTTrainer(
        model=model_of(options),
        args=SFTConfig(
            **arguments_of(options),
            max_length=BLOCK,
            packing=options.packing,
            packing_strategy="wrapped",
            assistant_only_loss=not options.packing and options.context == 1,
            use_liger_kernel=options.liger,
            pad_to_multiple_of=2 * options.context if options.context > 1 else None,
        ),
        train_dataset=conversations(2000),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", choices=["clm", "sft"], default="clm")
    parser.add_argument("--shard", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="activations computed again in backward")
    parser.add_argument("--context", type=int, default=1, help="ranks that share a sequence")
    options = parser.parse_args()
    (train_clm if options.trainer == "clm" else train_sft)(options)


if __name__ == "__main__":
    main()
