"""Advice on a pipeline's schedule: how many micro-batches are between forward and backward at once.

Advice in the terms of Megatron-LM and megatron-core: the flags to type where the script is Megatron's.

Which modules can be recomputed, and which flags exclude each other: ``transformer/transformer_config.py`` of
megatron-core 0.16.1. ``TransformerConfig`` has the same names with underscores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from fakedist.analysis.evidence import (
    Change,
    Evidence,
    Passes,
    Price,
    Saving,
    kept_gradients,
    owners,
    passes_of,
    recompute_price,
    recomputed,
    stacks,
)
from fakedist.analysis.memory_tables import Fold
from fakedist.analysis.recording import Array
from fakedist.analysis.topology import find_pipeline
from fakedist.errors import JobError
from fakedist.units import parse_rank_list

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


_POINT_TO_POINT = r"send|recv"
_MICRO_BATCH = re.compile(r"--?(?:micro[-_]?batch(?:[-_]?size)?|mbs)")


@dataclass(frozen=True, eq=False)
class Flow:
    """The micro-batches of a rank's last step in a pipeline, each forward through the layers of one stack.

    Attributes:
        number: Micro-batches of a step.
        in_flight: The most that are between forward and backward at once.
        least_in_flight: As many as 1F1B needs on this stage: the stages from it to the last.
        passes: The passes of the stack's layers.
        batch_of_pass: By pass, the number of its micro-batch in its step.
    """

    number: int
    in_flight: int
    least_in_flight: int
    passes: Passes
    batch_of_pass: Array

    @classmethod
    def of(cls, evidence: Evidence) -> Flow | None:
        """None without a pipeline, or if its micro-batches do not go through the layers one after the other."""
        stage = _stages_from_here(evidence) if sends(evidence) else 0
        for fold in stacks(evidence) if stage else ():
            passes = passes_of(evidence, owners(evidence.layers, fold.layers))
            if passes is None:
                continue
            begins = passes.owner == passes.owner.min()
            of_step = passes.step == passes.step.max()
            number = int((begins & of_step).sum())
            order = np.tile(np.unique(passes.owner), number)
            if not np.array_equal(passes.owner[of_step], order):
                return None
            count = np.cumsum(begins) - 1
            first = np.array([count[passes.step == step][0] for step in passes.step])
            back = passes.back_event[begins & of_step]
            in_flight = [
                int((passes.first_event[begins & of_step] <= at).sum() - (back <= at).sum()) for at in back - 1
            ]
            return cls(number, max(in_flight), stage, passes, count - first)
        return None


def sends(evidence: Evidence) -> bool:
    """Whether the last step sends to single ranks, or receives from them."""
    return bool(evidence.last_calls["operation"].str.contains(_POINT_TO_POINT).any())


def is_torch_pipeline(evidence: Evidence) -> bool:
    """Whether torch.distributed.pipelining runs the micro-batches: it splits the first dimension of each input."""
    return bool(evidence.files.astype(str).str.contains("/torch/distributed/pipelining/").any())


def _stages_from_here(evidence: Evidence) -> int:
    """The number of pipeline stages from this rank's to the last; 0 if it is not known."""
    calls = evidence.last_calls
    used = calls.loc[calls["operation"].str.contains(_POINT_TO_POINT), "group"].unique()
    own = evidence.groups.iloc[int(used[0])]
    if is_torch_pipeline(evidence):  # it needs a group whose ranks are the stages
        return int(own["size"]) - int(own["group_rank"]) if len(used) == 1 else 0
    rank = parse_rank_list(str(own["ranks"]))[int(own["group_rank"])]
    try:
        pipeline = find_pipeline(evidence.groups, evidence.calls, rank)
    except JobError:
        return 0
    return len(pipeline.ranks) - pipeline.ranks.index(rank) if pipeline and rank in pipeline.ranks else 0


def micro_batch(evidence: Evidence, flow: Flow) -> tuple[int, str]:
    """Samples of a micro-batch, and the flag of the command line that has them. 0 if they are not known for certain.

    The first dimension of a stage's input counts samples if the only other is the sequence's, or if torch splits it.
    """
    last = evidence.steps.iloc[-1]
    samples = int(last["samples"])
    if not samples or samples % flow.number:
        return 0, ""
    size = samples // flow.number
    words = [word for argument in evidence.setup.arguments for word in argument.split("=", 1)]
    named = (flag for flag, value in pairwise(words) if _MICRO_BATCH.fullmatch(flag) and value == str(size))
    flag = next(named, "")
    is_known = flag or is_torch_pipeline(evidence) or "x" not in str(last["sample_shape"])
    return (size, flag) if is_known else (0, "")


def alternate(evidence: Evidence) -> Iterator[Change]:
    """A pipeline that runs all forwards before the first backward: with 1F1B, fewer micro-batches are in flight.

    Forwards of the run at which the next micro-batches would not have begun yet, or their backwards would have ended,
    lack what those saved. At least, the gradients of the first backwards are there during the later forwards. At most,
    a script that held micro-batches beyond their backwards, with what it received and sent for them, no longer does.
    """
    flow = Flow.of(evidence)
    if flow is None or flow.number <= flow.least_in_flight:
        return
    width, blocks = flow.least_in_flight, evidence.blocks
    made, freed, bytes_ = (blocks[name].to_numpy() for name in ("alloc_event", "free_event", "bytes"))
    gone, held, more = (np.zeros(len(blocks)) for _ in range(3))
    late = np.zeros(len(blocks), bool)
    passed_on = evidence.category("communication")
    starts, ends = made.copy(), made.copy()
    kept, _ = kept_gradients(evidence)
    for step in np.unique(flow.passes.step).tolist():
        saved = _saved(evidence, flow, step)
        if saved is None:
            return
        own, batch, next_back = saved
        number = int(batch.max()) + 1
        if number <= width:  # of a step with fewer micro-batches
            return
        begin, over = (np.full(number, sign * np.iinfo("i8").max) for sign in (1, -1))
        np.minimum.at(begin, batch, made[own])
        in_time = freed[own] < next_back[batch]  # a script that holds outputs for longer may do so or not
        np.maximum.at(over, batch[in_time], freed[own][in_time])
        all_forward, over = int(made[own].max()) + 1, _ends_of_spans(evidence, over, next_back)
        leaves = np.append(begin, np.full(width, all_forward))[np.arange(number) + width]
        returns = np.append(np.full(width, all_forward), over)[:number]
        gone[own], starts[own], ends[own] = bytes_[own], leaves[batch], returns[batch]
        late[own] = ~in_time & (batch + width < number)
        of_block = np.searchsorted(next_back[:-1], made, "right")  # the backward during or before which it is made
        is_own = (made < begin[0]) | (evidence.phase("backward") & (made < freed[own].max()))
        other = np.flatnonzero(passed_on & is_own & (freed > next_back[of_block]) & (freed < freed[own].max()))
        more[other], starts[other], late[other] = bytes_[other], np.maximum(made, over[of_block])[other], True
        of_step = kept[blocks["step"].to_numpy()[kept] == step]
        held[of_step], starts[of_step], ends[of_step] = bytes_[of_step], begin[width], all_forward
    calls = evidence.last_calls
    sent = calls.loc[calls["operation"].str.contains(_POINT_TO_POINT), "sequence"]
    yield Change(
        "one-forward-one-backward",
        "begin each backward as soon as it can, not after all forwards"
        + (": Schedule1F1B instead of ScheduleGPipe" if is_torch_pipeline(evidence) else " (1F1B)"),
        f"all {flow.number} micro-batches of a step are between forward and backward at once; with 1F1B, {width} are, "
        "one for each stage from this one to the last. Smaller micro-batches alone save little here, as all of them "
        "stay. The bubble is as long, but each micro-batch waits for its sends and receives",
        Saving(gone + more, starts, np.where(late, freed, ends)),
        Saving(gone - held, starts, ends),
        line=evidence.main_line(gone > 0),
        subjects=frozenset({"schedule"}),
        price=None if evidence.kernels is None else Price(0.0, evidence.calls_us(sent), "sends and receives"),
        has_other_blocks=True,
    )


def _saved(evidence: Evidence, flow: Flow, step: int) -> tuple[Array, Array, Array] | None:
    """Blocks that a step's forwards saved, the micro-batch of each, and by micro-batch the next one's first free.

    None if the backwards of the micro-batches are in another order than their forwards.
    """
    passes, blocks = flow.passes, evidence.blocks
    made, freed = (blocks[name].to_numpy() for name in ("alloc_event", "free_event"))
    of_step = passes.step == step
    number = int(flow.batch_of_pass[of_step].max()) + 1
    begin, back = (np.full(number, np.iinfo("i8").max) for _ in range(2))
    end = np.zeros(number, "i8")
    batch = flow.batch_of_pass[of_step]
    np.minimum.at(begin, batch, passes.first_event[of_step])
    np.minimum.at(back, batch, passes.back_event[of_step])
    np.maximum.at(end, batch, passes.end_event[of_step])
    if (np.diff(back) <= 0).any() or back[0] <= end[-1]:
        return None
    saved = evidence.category("activation") & evidence.phase("forward") & ~blocks["recompute"].to_numpy()
    own = np.flatnonzero(saved & (blocks["step"].to_numpy() == step) & (freed > end[-1]))
    of_block = np.maximum(np.searchsorted(begin, made[own], "right") - 1, 0)
    # After the last layer follow the loss, and the next micro-batch's embedding, which outlives this backward.
    is_next = (made[own] > end[of_block]) & (freed[own] > back[of_block]) & (of_block < number - 1)
    return own, of_block + is_next, np.append(back[1:], np.iinfo("i8").max)


def _ends_of_spans(evidence: Evidence, events: Array, limits: Array) -> Array:
    """The first events of the spans after some events, if they begin before the limits; else the next events."""
    begins = np.append(evidence.spans["first_event"].to_numpy(), np.iinfo("i8").max)
    following = begins[np.searchsorted(begins, events, "right")]
    return np.where(following < limits, following, events + 1)
