"""Advice in the terms of Megatron-LM and megatron-core: the flags to type where the script is Megatron's.

Which modules can be recomputed, and which flags exclude each other: ``transformer/transformer_config.py`` of
megatron-core 0.16.1. ``TransformerConfig`` has the same names with underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fakedist.analysis.evidence import (
    Change,
    Evidence,
    Passes,
    Price,
    Saving,
    owners,
    passes_of,
    recompute_price,
    recomputed,
)
from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.recording import Array

_CORE, _ENGINE = re.compile(r"/megatron/(?:core|training)/"), re.compile(r"/transformer_engine/")


@dataclass(frozen=True)
class _Module:
    """A value of ``--recompute-modules``.

    Attributes:
        name: The value of ``--recompute-modules``.
        path: A pattern of the names of the modules in a layer that it recomputes.
        class_name: A pattern of their classes.
        keeps_output: Whether their output stays. If not, it is recomputed for what comes after.
        needs_engine: Whether it is advised for Transformer Engine's layers alone. Of megatron-core's own layers, the
            backward of a recomputed ``mlp`` did not end (0.16.1), and the last three do not exist.
        operation: A pattern of the operations whose results it drops; all if empty.
    """

    name: str
    path: str
    class_name: str = ""
    keeps_output: bool = True
    needs_engine: bool = False
    operation: str = ""


_MODULES = (
    _Module("core_attn", r"\.self_attention\.core_attention"),
    _Module("mlp", r"\.mlp", r"^(?!.*MoE)", needs_engine=True),
    _Module("moe", r"\.mlp", "MoE", needs_engine=True),
    _Module("shared_experts", r"\.mlp\.shared_experts", needs_engine=True),
    _Module("layernorm", r"\.(?:input|pre_mlp)_layernorm", keeps_output=False, needs_engine=True),
    _Module("moe_act", r"\.mlp\.experts", "", False, True, r"silu|gelu|swiglu|relu|\.mul\."),
    _Module("mla_up_proj", r"\.self_attention\.linear_(?:q|kv)_up_proj", "", False, True),
)


@dataclass(frozen=True)
class Megatron:
    """A script of Megatron-LM's, or one that builds its model from megatron-core.

    Attributes:
        arguments: Its command line.
        has_engine: Whether its layers are Transformer Engine's.
    """

    arguments: tuple[str, ...]
    has_engine: bool

    @classmethod
    def of(cls, evidence: Evidence) -> Megatron | None:
        """None if none of the run's stacks is in Megatron, or its layers are not Megatron's."""
        files = evidence.files.astype(str)
        has_layers = evidence.layers["class_name"].astype(str).isin(("TransformerBlock", "TransformerLayer")).any()
        if not has_layers or not files.str.contains(_CORE).any():
            return None
        return cls(evidence.setup.arguments, bool(files.str.contains(_ENGINE).any()))

    def has(self, flag: str) -> bool:
        """Whether a flag is on the command line."""
        return any(argument.partition("=")[0] == f"--{flag}" for argument in self.arguments)

    def values(self, flag: str) -> list[str]:
        """The values of a flag on the command line."""
        for number, argument in enumerate(self.arguments):
            name, _, value = argument.partition("=")
            if name == f"--{flag}":
                rest = self.arguments[number + 1 :]
                end = next((at for at, text in enumerate(rest) if text.startswith("--")), len(rest))
                return [value, *rest[:end]] if value else list(rest[:end])
        return []

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch as the command line has them; 0 if it does not."""
        values = self.values("micro-batch-size")
        return int(values[0]) if values and values[0].isdecimal() else 0

    @property
    def can_offload(self) -> bool:
        """Whether ``--cpu-offloading`` runs: with Transformer Engine, without a pipeline and recomputation."""
        pipeline = self.values("pipeline-model-parallel-size")
        is_free = not any(self.has(flag) for flag in ("recompute-granularity", "recompute-activations"))
        return self.has_engine and pipeline in ([], ["1"]) and is_free and not self.has("cpu-offloading-num-layers")

    def offload_flags(self, num_layers: int) -> str:
        """The flags that offload the activations of so many layers."""
        return f"--cpu-offloading-num-layers {num_layers}"

    def optimizer_flags(self) -> str:
        """The flags that shard the optimizer over the data-parallel ranks, and hide what that sends."""
        hidden = [f"--{flag}" for flag in ("overlap-grad-reduce", "overlap-param-gather") if not self.has(flag)]
        return " ".join(["--use-distributed-optimizer", *hidden])

    def recompute(self, evidence: Evidence, fold: Fold, owner: Array, passes: Passes) -> Iterator[Change]:
        """Recomputation of whole layers, and of modules in them."""
        modules = [*self._modules(evidence, fold)]
        everything = frozenset({fold.name, *(module.name for module, _ in modules)})
        yield from self._full(evidence, fold, owner, passes, everything)
        for module, members in modules:
            change = self._selective(evidence, fold, module, members)
            if change is not None:
                yield change

    def _full(
        self, evidence: Evidence, fold: Fold, owner: Array, passes: Passes, subjects: frozenset[str]
    ) -> Iterator[Change]:
        number = len(fold.layers)
        for some in sorted({number, number // 2, number // 4} - {0}, reverse=True):
            how = "uniform --recompute-num-layers 1" if some == number else f"block --recompute-num-layers {some}"
            flags = f"--recompute-granularity full --recompute-method {how}"
            words = "" if some == number else f"the first {some} of "
            saving = recomputed(evidence, passes, passes.owner < some)
            yield Change(
                "checkpoint",
                f"recompute {words}{fold.name} ({fold.class_name}): {flags}",
                "each layer keeps only its output and recomputes the rest in backward"
                + ("" if some == number else "; of a pipeline, each stage recomputes so many layers"),
                saving,
                saving,
                subjects=subjects,
                price=_reentrant_price(evidence, passes, (owner >= 0) & (owner < some)),
                is_variant=some < number,
                has_other_blocks=True,
            )

    def _modules(self, evidence: Evidence, fold: Fold) -> Iterator[tuple[_Module, list[int]]]:
        names, classes = (evidence.layers[column].astype(str).tolist() for column in ("name", "class_name"))
        layers = {names[layer] for layer in fold.layers}
        for module in _MODULES:
            matcher = re.compile(rf"(.*){module.path}")
            is_class = re.compile(module.class_name)
            members = [
                layer
                for layer, name in enumerate(names)
                if (match := matcher.fullmatch(name)) and match[1] in layers and is_class.search(classes[layer])
            ]
            if members and (self.has_engine or not module.needs_engine):
                yield module, members

    def _selective(self, evidence: Evidence, fold: Fold, module: _Module, members: list[int]) -> Change | None:
        owner = owners(evidence.layers, members)
        passes = passes_of(evidence, owner)
        if passes is None:
            return None
        saving = recomputed(evidence, passes, np.ones(len(passes.owner), bool), keeps_output=module.keeps_output)
        if module.operation:
            saving = Saving(
                np.where(evidence.operation(module.operation), saving.bytes_, 0), saving.starts, saving.ends
            )
        before = self.values("recompute-modules") if self.values("recompute-granularity") == ["selective"] else []
        flags = " ".join(["--recompute-granularity selective --recompute-modules", *before, module.name])
        # At most, the gradient of each tensor that it gets is copied, too: no longer than its forward.
        price = _reentrant_price(evidence, passes, owner >= 0)
        return Change(
            "recompute-module",
            f"recompute {module.name} of {fold.name}: {flags}",
            f"{module.name} of each layer is computed again in backward; one --recompute-modules names all modules",
            saving,
            saving,
            subjects=frozenset({module.name}),
            price=None if price is None else replace(price, high_us=2 * price.high_us),
            has_other_blocks=True,
        )


def _reentrant_price(evidence: Evidence, passes: Passes, layers: Array) -> Price | None:
    """The time of the kernels that run again.

    At most, the GPU also waits as long as the host needs for one layer: each has a backward of its own.
    """
    price = recompute_price(evidence, passes, layers)
    if price is None:
        return None
    waits_us = evidence.host_us("forward", layers) / max(len(np.unique(passes.owner)), 1)
    return replace(price, high_us=price.high_us + waits_us)
