"""The shapes of a language model, from the ``config.json`` that Hugging Face's models come with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fakedist.bounded import UnreadableError, read_json
from fakedist.errors import JobError

#: Decoders whose layers are the same: norms, attention of all keys with grouped heads, and a gated product or experts.
#: Of each, whether its keys and queries have norms of their own.
_TYPES = {"llama": False, "mistral": False, "qwen2": False, "qwen3": True, "mixtral": False, "qwen3_moe": True}
_HINT = "give the config.json of a model in bf16 of one of these types: " + ", ".join(_TYPES)
_MOST = 1 << 40


@dataclass(frozen=True)
class ModelShapes:
    """A decoder in bf16.

    Attributes:
        heads: Query heads.
        width: Elements of a head.
        inner: Width between the two products of a layer, or of one of its experts.
        experts: Experts of a layer; 0 without.
        top_k: Experts that a token goes to.
        has_head_norms: Whether keys and queries have norms.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    has_head_norms: bool = False

    def check_split(self, ranks: int) -> None:
        """Raise JobError if tensor parallelism over so many ranks does not split it evenly."""
        if self.heads % ranks or self.inner % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise JobError(
                f"{self.heads} heads, {self.kv_heads} of them with keys, and {self.inner:,} columns do not split over "
                f"{ranks} GPUs",
                "give another --engine-tp",
            )


def read_model_config(path: Path) -> ModelShapes:
    """The shapes in a ``config.json``, or in that of a directory.

    Raises:
        JobError: It cannot be read, lacks a size, or is of a model that cannot be priced.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        values = read_json(path)
    except OSError as error:
        raise JobError(f"the model's configuration {path} cannot be read: {error.strerror}", _HINT) from error
    except UnreadableError as error:
        raise JobError(f"the model's configuration {path} cannot be read: {error}", _HINT) from error
    return model_shapes(values, str(path))


def model_shapes(values: object, where: str) -> ModelShapes:
    """The shapes in what a ``config.json`` contains, which is from ``where``.

    Raises:
        JobError: It lacks a size, or is of a model that cannot be priced.
    """
    if not isinstance(values, dict):
        raise JobError(f"{where} is not the configuration of a model", _HINT)
    if why := _why_not(values):
        raise JobError(f"{where}: {why}", _HINT)
    heads, hidden = _size(where, values, "num_attention_heads"), _size(where, values, "hidden_size")
    has_experts = str(values["model_type"]) in ("mixtral", "qwen3_moe")
    experts = _size(where, values, "num_experts", "num_local_experts") if has_experts else 0
    inner = ("moe_intermediate_size", "intermediate_size") if experts else ("intermediate_size",)
    return ModelShapes(
        layers=_size(where, values, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_size(where, values, "num_key_value_heads") if values.get("num_key_value_heads") else heads,
        width=_size(where, values, "head_dim") if values.get("head_dim") else max(hidden // heads, 1),
        inner=_size(where, values, *inner),
        vocabulary=_size(where, values, "vocab_size"),
        experts=experts,
        top_k=min(_size(where, values, "num_experts_per_tok"), experts) if experts else 0,
        has_head_norms=_TYPES[str(values["model_type"])],
    )


def _why_not(values: dict[str, object]) -> str:
    """Why a model cannot be priced; empty if it can."""
    kind = values.get("model_type")
    if kind not in _TYPES:
        return f"model_type {kind!r} has other layers than those that can be priced"
    if values.get("quantization_config"):
        return "its weights are quantized, and vLLM's kernels for those were not measured"
    if values.get("sliding_window") and values.get("use_sliding_window", True):
        return "it has a sliding window, whose decoding is not kept"
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        return "only some of its layers have experts"
    dtype = values.get("dtype") or values.get("torch_dtype")
    if dtype not in (None, "bfloat16", "float16", "float32"):  # vLLM makes 2 bytes of float32
        return f"it is in {dtype}"
    return ""


def _size(where: str, values: dict[str, object], *names: str) -> int:
    value = next((values[name] for name in names if values.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise JobError(f"{where}: {names[0]} is {value!r}, not a number of 1 or more", _HINT)
    return value
