"""Files that a project loads: a Llama with random weights, its tokenizer, conversations. Without torch, in a second."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.clients.catalogue.arithmetic import Transformer

LLAMA = Transformer(4, 1024, 2816, 8192, keys=256)
WORDS, CONVERSATIONS = 300, 512
_HEAD_DIM = 64
_SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
_TEMPLATE = "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}</s>"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": LLAMA.vocabulary,
    "hidden_size": LLAMA.hidden,
    "intermediate_size": LLAMA.ffn,
    "num_hidden_layers": LLAMA.layers,
    "num_attention_heads": LLAMA.hidden // _HEAD_DIM,
    "num_key_value_heads": LLAMA.kv // _HEAD_DIM,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}


def _shapes() -> dict[str, list[int]]:
    """Of each parameter, by Transformers' name."""
    hidden, kv, ffn = LLAMA.hidden, LLAMA.kv, LLAMA.ffn
    attention = {"q_proj": [hidden, hidden], "k_proj": [kv, hidden], "v_proj": [kv, hidden], "o_proj": [hidden, hidden]}
    dense = {"gate_proj": [ffn, hidden], "up_proj": [ffn, hidden], "down_proj": [hidden, ffn]}
    shapes = {f"{end}.weight": [LLAMA.vocabulary, hidden] for end in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = [hidden]
    for layer in (f"model.layers.{number}" for number in range(LLAMA.layers)):
        shapes |= {f"{layer}.{norm}.weight": [hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}.mlp.{name}.weight": shape for name, shape in dense.items()}
    return shapes


def write_llama(directory: Path) -> None:
    """Write ``model/`` in Transformers' format, weights in bf16, and a tokenizer whose tokens are words."""
    model = directory / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(_CONFIG))
    special = [*_SPECIAL.values(), "<user>", "<assistant>"]
    words = [*special, *(f"w{number}" for number in range(LLAMA.vocabulary - len(special)))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": word, "special": number < 4, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for number, word in enumerate(special)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(words)}, "unk_token": "<unk>"},
    } | dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, **_SPECIAL}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    drawn, header, at = np.random.default_rng(0), {}, 0
    for name, shape in _shapes().items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    described = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    weights = (0.02 * drawn.standard_normal(at // 2, dtype=np.float32)).view(np.uint32) >> 16
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described + weights.astype(np.uint16).tobytes())


def write_conversations(directory: Path) -> None:
    """Write ``alpaca.json`` (instruction, input, output), ``messages.jsonl`` (messages) and ``texts.jsonl`` (text).

    Every question and answer has 300 words.
    """
    said = [" ".join(f"w{(n * 7 + k) % 8000}" for k in range(WORDS)) for n in range(CONVERSATIONS)]
    alpaca = [{"instruction": text, "input": "", "output": text} for text in said]
    (directory / "alpaca.json").write_text(json.dumps(alpaca))
    messages = [[{"role": role, "content": text} for role in ("user", "assistant")] for text in said]
    (directory / "messages.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    (directory / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
