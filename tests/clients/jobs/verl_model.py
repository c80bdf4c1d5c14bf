"""Writes what verl reads into a directory: a model with weights, a tokenizer of bytes, and prompts."""

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
    # Transformers makes its own tokenizer for Qwen2 of it, in which a byte without merges is a token.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<eos>", "<|im_end|>"]
    words = {word: at for at, word in enumerate([*special, *letters])}
    words |= {f"w{at}": at for at in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.add_special_tokens(special)
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    processing.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
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
            "prompt": [{"role": "user", "content": "a" * (PROMPT - number % 2)}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": number},
        }
        for number in range(num_prompts)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), Path(directory) / PROMPTS)


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]))
