"""Write a Llama with random weights, its tokenizer and conversations, for projects that load them from files.

``python prepared_llama.py DIRECTORY`` makes ``model/``, ``alpaca.json`` (instruction, input, output),
``messages.jsonl`` (messages) and ``texts.jsonl`` (text). Every question and answer has 300 words, one token each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers_clm import FFN, HEADS, HIDDEN, KEY_HEADS, LAYERS, VOCABULARY, tokenizer

WORDS, CONVERSATIONS = 300, 512
#: A template of chats that needs none of Transformers' own tags.
TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}</s>"


def main() -> None:
    """Write everything into the directory of the first argument."""
    directory = Path(sys.argv[1])
    words = tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(directory / "model")
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
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory / "model")
    said = [" ".join(f"w{(n * 7 + k) % 8000}" for k in range(WORDS)) for n in range(CONVERSATIONS)]
    alpaca = [{"instruction": text, "input": "", "output": text} for text in said]
    (directory / "alpaca.json").write_text(json.dumps(alpaca))
    messages = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in said]
    (directory / "messages.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    (directory / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in said))


if __name__ == "__main__":
    main()
