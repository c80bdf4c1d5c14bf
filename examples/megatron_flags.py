"""Megatron-LM's command line for megatron-core: every setting of its configurations is a flag, by Megatron-LM's name.

Most flags are not listed here: megatron-core's dataclasses have the settings, their types, and Megatron-LM's names for
them if these differ (``argparse_meta``). This file has the names and defaults of Megatron-LM that differ from the
dataclasses', and the flags of the training script itself. Any other flag is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import __version__ as MEGATRON_VERSION
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_presets import PRESETS

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}

#: Megatron-LM's own names: setting of a configuration -> flag.
_NAMES = {
    "num_moe_experts": "--num-experts",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "apply_rope_fusion": "--rope-fusion",
    "fp8_param": "--fp8-param-gather",
    "overlap_p2p_comm": "--overlap-p2p-communication",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "check_for_nan_in_grad": "--check-for-nan-in-loss-and-grad",
    "average_in_collective": "--ddp-average-in-collective",
    "bucket_size": "--ddp-bucket-size",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "nccl_ub": "--use-nccl-ub",
}
#: Settings that follow from others, as in Megatron-LM.
_DERIVED = {
    "virtual_pipeline_model_parallel_size", "batch_p2p_comm", "gated_linear_unit", "activation_func", "add_bias_linear",
    "bias_activation_fusion", "fp8_param_gather", "is_hybrid_model", "deallocate_pipeline_outputs", "params_dtype",
    "pipeline_dtype", "enable_autocast", "autocast_dtype", "quant_recipe", "config_logger_dir", "bf16", "fp16",
}  # fmt: skip
#: Where Megatron-LM's default is another than the dataclass's.
DEFAULTS = {
    "gradient_accumulation_fusion": True, "masked_softmax_fusion": True, "bias_dropout_fusion": True,
    "apply_rope_fusion": True, "persist_layer_norm": True, "attention_softmax_in_fp32": False,
    "overlap_p2p_comm": True, "align_param_gather": True, "check_for_nan_in_grad": True, "normalization": "LayerNorm",
    "min_lr": 0.0, "optimizer_offload_fraction": 1.0,
}  # fmt: skip
#: Flags of Megatron-LM that change nothing of what a training step computes and holds.
_WITHOUT_EFFECT = """
    use-mcore-models mock-data use-flash-attn no-mmap-bin-files finetune auto-detect-ckpt-format
    no-ckpt-fully-parallel-save log-timers-to-tensorboard log-memory-to-tensorboard log-params-norm
    log-validation-ppl-to-tensorboard log-throughput record-memory-history
    data-cache-path= split= num-workers= eval-iters= eval-interval= exit-duration-in-mins= log-interval=
    logging-level= dist-ckpt-strictness= memory-snapshot-path= save= save-interval= load= tensorboard-dir= data-path=
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; a preset's flags come first, so that later ones override them.

    Returns:
        The flags that were given, and defaults of those of the script. ``ignored`` lists those without effect.
    """
    parser = _Parser(description="Train a GPT built from megatron-core.", allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS, help="one of three published jobs; other flags override its own")
    _add_script_flags(parser)
    for flag in _WITHOUT_EFFECT.split():
        name, takes_value, _ = flag.partition("=")
        parser.add_argument(f"--{name}", action=_Ignored, nargs=1 if takes_value else 0, help=argparse.SUPPRESS)
    for config in (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for field in dataclasses.fields(config):
            _add_field(parser, field)
    preset = parser.parse_known_args(arguments)[0].preset
    args = parser.parse_args([*(PRESETS[preset][1] if preset else ()), *arguments])
    for name, value in DEFAULTS.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    return args


def settings_of(config: type, args: argparse.Namespace) -> dict[str, Any]:
    """The flags that are settings of one of megatron-core's configurations."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(config) if hasattr(args, field.name)}


def only_for_latent_attention(args: argparse.Namespace) -> Iterator[str]:
    """Flags that were given and that only multi-latent attention has."""
    plain = {field.name for field in dataclasses.fields(TransformerConfig)}
    of_both = {"rotary_base", "rotary_percent", "rotary_scaling_factor"}
    for name in settings_of(MLATransformerConfig, args):
        if name not in plain | of_both:
            yield _flag(name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = f"{unknown}: neither a setting of megatron-core {MEGATRON_VERSION} nor a flag of this script"
        raise SystemExit(f"{self.prog}: {message}; {self.prog} --help lists what there is")


class _Ignored(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.ignored = [*namespace.ignored, str(option_string)]


def _add_script_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the training script: batches, vocabulary, schedule, and what stands for several settings."""
    number, real, switch = {"type": int}, {"type": float}, {"action": "store_true"}
    pair = {"action": argparse.BooleanOptionalAction}
    flags: dict[str, dict[str, Any]] = {
        "--micro-batch-size": number | {"default": 1},
        "--global-batch-size": number,
        "--max-microbatches": number | {"help": "run no more than so many microbatches a step, 0: all of the global "
                                                "batch (default: what fills the pipeline, two a stage)"},
        "--seq-length": number,
        "--max-position-embeddings": number,
        "--vocab-size": number | {"default": 32_000},
        "--make-vocab-size-divisible-by": number | {"default": 128},
        "--train-iters": number, "--train-samples": number, "--exit-interval": number | {"default": 10},
        "--seed": number | {"default": 1234},
        "--lr-decay-style": {"default": "linear"}, "--lr-decay-samples": number, "--lr-decay-iters": number,
        "--lr-warmup-samples": number | {"default": 0}, "--lr-warmup-init": real | {"default": 0.0},
        "--manual-gc": switch, "--manual-gc-interval": number | {"default": 0},
        "--empty-unused-memory-level": {"type": int, "choices": (0, 1, 2), "default": 0},
        "--distributed-timeout-minutes": number | {"default": 10},
        "--tp-comm-overlap-cfg": {"help": "a YAML file of how products and their collectives overlap"},
        "--fake-process-group": switch | {"help": "torch's own fake backend, as Megatron-LM starts it"},
        "--disable-gloo-process-groups": switch,
        "--tokenizer-type": {"choices": ["NullTokenizer"], "default": "NullTokenizer"},
        "--create-attention-mask-in-dataloader": pair | {"default": True},
        "--transformer-impl": {"choices": ["transformer_engine", "local", "auto"], "default": "auto"},
        "--bf16": pair | {"default": False}, "--fp16": pair | {"default": False},
        "--swiglu": pair | {"default": False}, "--squared-relu": switch, "--quick-geglu": switch,
        "--bias-swiglu-fusion": pair | {"default": True}, "--bias-gelu-fusion": pair | {"default": True},
        "--disable-bias-linear": switch, "--group-query-attention": pair | {"default": False},
        "--untie-embeddings-and-output-weights": pair | {"default": False},
        "--position-embedding-type": {"default": "learned_absolute",
                                      "choices": ["learned_absolute", "rope", "mrope", "yarn", "none"]},
        "--hybrid-override-pattern": {"help": "a model of Mamba layers (M), attention (*), MLPs (-) and experts (E)"},
        "--rotary-seq-len-interpolation-factor": real, "--use-rope-scaling": switch,
        "--num-virtual-stages-per-pipeline-rank": {"type": _or_none(int)},
        "--num-layers-per-virtual-pipeline-stage": {"type": _or_none(int)},
        "--grad-reduce-in-bf16": switch, "--recompute-activations": switch,
        "--align-grad-reduce": pair | {"default": True},
    }  # fmt: skip
    for name, how in flags.items():
        parser.add_argument(name, **how)
    parser.set_defaults(ignored=[])


def _flag(setting: str) -> str:
    return _NAMES.get(setting, "--" + setting.replace("_", "-"))


def _add_field(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    """Add a flag for one setting, unless it has one, or is none for a command line (functions, timers)."""
    named = field.metadata.get("argparse_meta", {}).get("arg_names", [_flag(field.name)])
    if field.name in _DERIVED or field.name[0] == "_" or named[0] in parser._option_string_actions:
        return
    kind = _alternatives(field.type)
    if field.name == "moe_layer_freq":
        parser.add_argument(*named, dest=field.name, default=argparse.SUPPRESS, type=_layer_pattern)
    elif bool in kind:
        # A name of its own for a setting that is on ("--disable-...", "--no-...") is the one that turns it off.
        off = named[0] if named[0].startswith(("--no-", "--disable-")) else f"--no-{named[0][2:]}"
        on = named[0] if off != named[0] else re.sub("^--(no|disable)-", "--", named[0])
        parser.add_argument(on, dest=field.name, action="store_true", default=argparse.SUPPRESS)
        parser.add_argument(off, dest=field.name, action="store_false", default=argparse.SUPPRESS)
    elif (reads := _reader(kind)) is not None:
        parser.add_argument(*named, dest=field.name, default=argparse.SUPPRESS, **reads)


def _alternatives(annotation: Any) -> list[Any]:
    """The types that an annotation allows, without None; of Literals their values."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [each for part in typing.get_args(annotation) for each in _alternatives(part)]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [] if annotation is type(None) else [annotation]


def _reader(kind: list[Any]) -> dict[str, Any] | None:
    """How argparse reads a value of these types; None where a command line has no such values."""
    lists = [each for each in kind if typing.get_origin(each) in (list, tuple)]
    words = [each for each in kind if isinstance(each, str)]
    if words:
        return {"type": _or_none(str), "choices": [*words, None]}
    for scalar in (int, float, str):
        if any(scalar in typing.get_args(each) for each in lists):
            return {"type": scalar, "nargs": "+", "action": _OneOrMore if scalar in kind else "store"}
        if scalar in kind:
            return {"type": _or_none(scalar)}
    if torch.dtype in kind:
        return {"type": DTYPES.__getitem__, "metavar": "|".join(DTYPES)}
    enums = [each for each in kind if isinstance(each, type) and issubclass(each, enum.Enum)]
    return {"type": enums[0].__getitem__, "metavar": "|".join(each.name for each in enums[0])} if enums else None


class _OneOrMore(argparse.Action):
    """A list, or the value itself where there is one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values if len(values) > 1 else values[0])


def _or_none(scalar: type) -> Any:
    """Reads a scalar; ``none`` takes back what a preset says."""

    def read(text: str) -> Any:
        return None if text == "none" else scalar(text)

    read.__name__ = scalar.__name__
    return read


def _layer_pattern(text: str) -> int | list[int]:
    """``2`` or ``([0]*3+[1]*58)``: which layers have experts."""
    if not re.fullmatch(r"[\d\s\[\](),*+]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a pattern such as ([0]*3+[1]*58)")
    found: int | list[int] = eval(text, {"__builtins__": {}})
    return found
