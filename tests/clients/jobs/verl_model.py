"""What verl reads from files: a model with weights, a tokenizer of words, and prompts. They go to the directory given."""

import sys
from pathlib import Path

import pyarrow
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

VOCABULARY, HIDDEN, INNER, LAYERS = 16000, 512, 1536, 4
PROMPT = 128
PROMPTS = "prompts.parquet"


def write(directory: str, num_prompts: int) -> None:
    special = ["<pad>", "<eos>", "<|im_end|>", "\n"]  # verl asks tokenizers of Qwen's models for the last two
    words = {word: at for at, word in enumerate([*special, *(f"w{at}" for at in range(len(special), VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    processing.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    processing.save_pretrained(directory)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": " ".join(["w9"] * (PROMPT - number % 2))}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": number},
        }
        for number in range(num_prompts)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), Path(directory) / PROMPTS)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
