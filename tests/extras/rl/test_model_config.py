"""Shapes from a model's config.json, and models that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fakedist.errors import JobError
from fakedist.extras.rl.model_config import ModelShapes, read_model_config

LLAMA = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


def _read(tmp_path: Path, **changes: object) -> ModelShapes:
    values = {key: value for key, value in (LLAMA | changes).items() if value != "missing"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_model_config(tmp_path)


def test_a_llama_has_its_sizes(tmp_path: Path) -> None:
    expected = ModelShapes(16, 2048, 32, 8, 64, 8192, 128256)
    assert _read(tmp_path) == _read(tmp_path, head_dim=None) == expected
    assert read_model_config(tmp_path / "config.json") == expected
    assert _read(tmp_path, num_key_value_heads="missing").kv_heads == 32


def test_experts_have_their_own_width(tmp_path: Path) -> None:
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    shapes = _read(tmp_path, model_type="qwen3_moe", **sizes)
    assert (shapes.experts, shapes.top_k, shapes.inner, shapes.has_head_norms) == (128, 8, 768, True)
    mixtral = _read(tmp_path, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert (mixtral.experts, mixtral.top_k, mixtral.inner, mixtral.has_head_norms) == (8, 2, 8192, False)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3' has other layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"sliding_window": 4096}, "sliding window"),
        ({"torch_dtype": "float8_e4m3fn"}, "is in float8_e4m3fn"),
        ({"hidden_size": "missing"}, "hidden_size is None, not a number of 1 or more"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": [0]}, "only some of its layers"),
    ],
)
def test_what_cannot_be_priced_is_refused(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(JobError, match=why):
        _read(tmp_path, **changes)


def test_a_window_that_is_not_used_does_not_matter(tmp_path: Path) -> None:
    assert _read(tmp_path, model_type="qwen2", sliding_window=4096, use_sliding_window=False).layers == 16


def test_a_file_that_is_not_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        read_model_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(JobError, match="is not the configuration of a model"):
        read_model_config(tmp_path)
