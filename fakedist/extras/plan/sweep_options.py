"""``fakedist sweep --auto``: the axes of a job from its script's own flags, and which layouts are legal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from fakedist.errors import SweepError, did_you_mean

if TYPE_CHECKING:
    from fakedist.options import JobProgram
    from fakedist.sweep.plan import CommandLineSettings
    from fakedist.sweep.space import Axis

OPTIONS: list[click.Parameter] = [
    click.Option(
        ("--auto", "flags"),
        multiple=True,
        metavar="NAME",
        help="Sweep the legal layouts by the script's own flags: megatron, torchtitan, or AXIS=FLAG[:VALUES], such as "
        "tp=--tp, mbs=--batch-size and checkpoint=--checkpoint:full,none. Repeatable.",
    )
]

#: The axes, and the largest of the sizes (powers of two) that each has by itself; 0 for as many as a node has GPUs.
_LARGEST = {"tp": 0, "pp": 16, "cp": 8, "ep": 64, "replicas": 8, "mbs": 8}
_CHECKPOINT = "checkpoint"
#: Along these, with the others fixed, a rank's tensors only grow: more sequences, fewer shards, less recomputation.
#: Not TP: its gathered inputs and logits are held next to their shards. Not PP, CP and EP: buffers come with them.
_GROWS = frozenset(("mbs", "replicas", _CHECKPOINT))


@dataclass(frozen=True)
class Flags:
    """The flags of a script.

    Attributes:
        sizes: By axis.
        checkpoint: The words for each way of recomputation, those that hold the least first.
        facts: By the names that conditions use.
        rare: Axes that are swept only if the command has their flag, or their values are given.
        batch: The flag of the global batch, if a step runs as many micro-batches as fill it; else empty.
        values: As texts, by axis, in place of the sizes that an axis has by itself.
    """

    sizes: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    rare: frozenset[str] = frozenset()
    batch: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


_RECOMPUTE = "--recompute-granularity"
_KNOWN = {
    "megatron": Flags(
        {
            "tp": "--tensor-model-parallel-size",
            "pp": "--pipeline-model-parallel-size",
            "cp": "--context-parallel-size",
            "ep": "--expert-model-parallel-size",
            "mbs": "--micro-batch-size",
        },
        {
            "full": (_RECOMPUTE, "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
            "selective": (_RECOMPUTE, "selective"),
            "none": (),
        },
        {
            "layers": "--num-layers",
            "heads": "--num-attention-heads",
            "kv_heads": "--num-query-groups",
            "experts": "--num-experts",
            "seq_len": "--seq-length",
            "global_batch": "--global-batch-size",
        },
        rare=frozenset(("cp", "ep")),
        batch="--global-batch-size",
    ),
    "torchtitan": Flags(
        {
            "tp": "--parallelism.tensor_parallel_degree",
            "pp": "--parallelism.pipeline_parallel_degree",
            "cp": "--parallelism.context_parallel_degree",
            "ep": "--parallelism.expert_parallel_degree",
            "replicas": "--parallelism.data_parallel_replicate_degree",
            "mbs": "--training.local_batch_size",
        },
        facts={"seq_len": "--training.seq_len", "global_batch": "--training.global_batch_size"},
        rare=frozenset(("pp", "cp", "ep")),
    ),
}
#: Frameworks whose settings are in files and variables, not in flags.
_IN_FILES = {
    "deepspeed": '[files.config] from = "ds.json", set = { "zero_optimization.stage" = "{stage}" }',
    **dict.fromkeys(("accelerate", "fsdp2"), 'env = { PARALLELISM_CONFIG_TP_SIZE = "{tp}" }'),
}
#: Conditions. One with a name that has no value is left out.
_LEGAL = (
    "{world} % ({parts}) == 0",
    "{per_node} % tp == 0",
    "heads % tp == 0",
    "kv_heads % tp == 0",
    "seq_len % tp == 0",
    "cp == 1 or seq_len % (2 * cp * {tp}) == 0",
    "layers % pp == 0",
    "experts % ep == 0",
    "{world} // ({tp} * {pp}) % ep == 0",
    "global_batch % (dp * mbs) == 0",
)
#: Where a step fills a global batch, so many micro-batches are recorded for each stage, and priced for all.
_RECORDED = "min(global_batch, 4 * {pp} * dp * mbs)"
_EXAMPLE = "--auto tp=--tp --auto checkpoint=--checkpoint:full,none"


def with_axes(
    values: Mapping[str, object], program: JobProgram, settings: CommandLineSettings
) -> tuple[JobProgram, CommandLineSettings]:
    """The program with placeholders, and the settings with the axes and conditions of ``--auto``.

    Raises:
        SweepError: It names a framework or an axis that is not known, or the world size is not one number.
    """
    texts = values["flags"]
    if not isinstance(texts, tuple) or not texts:
        return program, settings
    from fakedist.extras.plan.fitting import with_flags
    from fakedist.sweep.space import Expression

    flags, (world, per_node) = _read(texts), _world(settings)
    axes = _axes(flags, program.arguments, settings, min(per_node, world))
    names = {axis.name for axis in axes}
    derived = [f"{name}={text}" for name, flag in flags.facts.items() if (text := _number(program.arguments, flag))]
    sizes = {name: name if name in names else "1" for name in _LARGEST}
    model, parts = [name for name in ("tp", "pp", "cp") if name in names], ["replicas"] * ("replicas" in names)
    sizes["parts"] = " * ".join((*model, *parts)) or "1"
    derived += [*settings.derived, f"dp={world} // ({' * '.join(model) or 1})"]
    words = [word for name, flag in flags.sizes.items() if name in names for word in (flag, f"{{{name}}}")]
    counts = dict(settings.settings)
    if flags.batch and any(text.startswith("global_batch=") for text in derived):
        derived.append(f"recorded_batch={_RECORDED.format(**sizes)}")
        words += [flags.batch, "{recorded_batch}"]
        counts["micro_batches"] = counts.get("micro_batches") or "global_batch // (dp * mbs)"
    others = [word for ways in flags.checkpoint.values() for word in ways]
    words += ["{checkpoint}"] * bool(flags.checkpoint)
    legal = [text.format(world=world, per_node=min(per_node, world), **sizes) for text in _LEGAL]
    known = names | {text.partition("=")[0] for text in derived}
    return replace(program, arguments=tuple(with_flags(program.arguments, words, others))), replace(
        settings,
        axes=(*axes, *settings.axes),
        derived=derived,
        conditions=(*(text for text in legal if Expression(text, "--auto:").names <= known), *settings.conditions),
        settings=counts,
        grows=_GROWS,
    )


def _read(texts: Sequence[str]) -> Flags:
    """The flags that texts name or give; those of an axis replace the ones of a framework."""
    flags = Flags()
    for text in texts:
        name, equals, rest = text.partition("=")
        flag, _, values = rest.partition(":")
        if text in _IN_FILES:
            raise SweepError(
                f"--auto: settings of {text} are not flags of a script; a sweep file sets them", _IN_FILES[text]
            )
        if text in _KNOWN:
            flags = _KNOWN[text]
        elif not equals or name not in (*_LARGEST, _CHECKPOINT):
            known = [*_LARGEST, _CHECKPOINT] if equals else [*_KNOWN]
            raise SweepError(f"--auto has no {name}", did_you_mean(name, known) or f"it has {', '.join(known)}")
        elif not flag.startswith("--") or (name == _CHECKPOINT and not values):
            raise SweepError(f"--auto {text!r} has no {'values' if flag.startswith('--') else 'flag'}", _EXAMPLE)
        elif name == _CHECKPOINT:
            flags = replace(flags, checkpoint={value: (flag, value) for value in values.split(",")})
        else:
            known_values = {**flags.values, name: values} if values else flags.values
            flags = replace(flags, sizes={**flags.sizes, name: flag}, values=known_values)
    return flags


def _axes(flags: Flags, arguments: Sequence[str], settings: CommandLineSettings, per_node: int) -> list[Axis]:
    from fakedist.sweep.space import Axis, axis_of_text

    asked = {text.partition("=")[0] for text in settings.axes if isinstance(text, str)}
    present = {word.partition("=")[0] for word in arguments}
    axes = [
        axis_of_text(f"{name}={flags.values.get(name) or f'1..{_LARGEST[name] or per_node}*2'}")
        for name, flag in flags.sizes.items()
        if name not in flags.rare or name in asked or flag in present
    ]
    return axes + [Axis(_CHECKPOINT, tuple(flags.checkpoint), flags.checkpoint)] * bool(flags.checkpoint)


def _number(arguments: Sequence[str], flag: str) -> str:
    """The number that a command gives with a flag; empty without one."""
    pairs = zip(arguments, (*arguments[1:], ""), strict=True)
    given = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == flag]
    return given[-1] if given and given[-1].isdecimal() else ""


def _world(settings: CommandLineSettings) -> tuple[int, int]:
    """The ranks of the job, and of a node."""
    texts = {name: option.texts[-1] for name, option in settings.options.items() if not isinstance(option, bool)}
    per_node = texts.get("gpus_per_node", "8")
    size = texts.get("world_size", "")
    if not size and per_node.isdecimal() and texts.get("nnodes", "").isdecimal():
        size = str(int(texts["nnodes"]) * int(per_node))
    if not size.isdecimal() or not per_node.isdecimal() or not int(size) * int(per_node):
        raise SweepError("--auto needs the number of ranks", "--world-size 64")
    return int(size), int(per_node)
