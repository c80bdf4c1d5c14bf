"""Small files that jobs read in the place of what they would download: a tokenizer, a text data set."""

from __future__ import annotations

import json
from pathlib import Path

_WORDS = [f"word{number}" for number in range(500)]


def torchtitan_assets(directory: Path) -> None:
    """Where torchtitan's debug configurations look, from the directory they run in."""
    write_tokenizer(directory / "tests/assets/tokenizer")
    write_texts(directory / "tests/assets/c4_test")


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of 500 words, in the format of Hugging Face's tokenizers."""
    directory.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate((*special, *_WORDS))}
    added = [
        {"id": vocabulary[word], "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for word in special
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def write_texts(directory: Path) -> None:
    """2,000 texts of 500 words, as JSON lines with the columns of C4."""
    directory.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"text": " ".join(_WORDS), "timestamp": "2019-04-25T12:57:54Z", "url": "https://example.org"})
    (directory / "data.json").write_text(f"{line}\n" * 2_000)
