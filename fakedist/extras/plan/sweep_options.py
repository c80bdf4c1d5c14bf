"""``fakedist sweep --auto``: the axes of a job from its script's own settings, and which layouts are legal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.errors import SweepError, did_you_mean

if TYPE_CHECKING:
    from fakedist.options import JobProgram
    from fakedist.sweep.command import PointFile, Texts
    from fakedist.sweep.plan import CommandLineSettings
    from fakedist.sweep.space import Axis

OPTIONS: list[click.Parameter] = [
    click.Option(
        ("--auto", "flags"),
        multiple=True,
        metavar="NAME",
        help="Sweep the legal layouts by the script's own settings: megatron, torchtitan, deepspeed, accelerate, or "
        "AXIS=PLACE[:VALUES], where a place is a flag (tp=--tp), a variable (tp=TP_SIZE) or a key of a JSON file that "
        "the command names (mbs=ds.json#train_micro_batch_size_per_gpu). Repeatable.",
    )
]

#: The axes, and the largest of the sizes (powers of two) that each has by itself; 0 for as many as a node has GPUs.
_LARGEST = {"tp": 0, "pp": 16, "cp": 8, "ep": 64, "replicas": 8, "mbs": 8, "stage": 3}
#: Values that are not powers of two.
_VALUES = {"stage": "0..3"}
_CHECKPOINT = "checkpoint"
#: Along these, with the others fixed, a rank's tensors only grow: more sequences, fewer shards, less recomputation.
#: Not TP: its gathered inputs and logits are held next to their shards. Not PP, CP and EP: buffers come with them.
#: With fewer shards an optimizer computes more, with less recomputation nothing does. Other tokens do not compare.
_GROWS = {"mbs": 0, "replicas": 1, _CHECKPOINT: -1}


@dataclass(frozen=True)
class ScriptSettings:
    """Where a script takes its settings from: flags (``--tp``), variables (``TP_SIZE``) or keys (``ds.json#a.b``).

    Attributes:
        sizes: By axis.
        checkpoint: The words for each way of recomputation, those that hold the least first.
        checkpoint_at: Their variable or key; empty if the words are arguments.
        facts: By the names that conditions use.
        rare: Axes that are swept only if the command has their flag or key, or their values are given.
        batch: The global batch, if a step runs as many micro-batches as fill it; else empty.
        values: As texts, by axis, in place of the sizes that an axis has by itself.
        others: What a point also sets, with placeholders.
        legal: Conditions of its own.
        file_flags: The flags whose value is the file of the keys that name none.
    """

    sizes: Mapping[str, str] = field(default_factory=dict)
    checkpoint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    checkpoint_at: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    rare: frozenset[str] = frozenset()
    batch: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    legal: tuple[str, ...] = ()
    file_flags: tuple[str, ...] = ()


_RECOMPUTE = "--recompute-granularity"
_KNOWN = {
    "megatron": ScriptSettings(
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
        facts={
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
    "torchtitan": ScriptSettings(
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
    "deepspeed": ScriptSettings(
        {
            "stage": "#zero_optimization.stage",
            "tp": "#tensor_parallel.autotp_size",
            "mbs": "#train_micro_batch_size_per_gpu",
        },
        facts={"global_batch": "#train_batch_size"},
        rare=frozenset(("tp",)),
        batch="#train_batch_size",
        others={"#gradient_accumulation_steps": "{accumulated}"},
        legal=("stage <= 1 or {pp} == 1",),
        file_flags=("--deepspeed_config", "--deepspeed-config", "--deepspeed"),
    ),
    "accelerate": ScriptSettings(
        {
            "tp": "PARALLELISM_CONFIG_TP_SIZE",
            "cp": "PARALLELISM_CONFIG_CP_SIZE",
            "replicas": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        },
        {"full": ("true",), "none": ("false",)},
        checkpoint_at="FSDP_ACTIVATION_CHECKPOINTING",
        rare=frozenset(("cp",)),
        others={
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": "{shards}",
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
        },
        legal=("shards * {cp} > 1",),
    ),
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
    "global_batch % (dp * {mbs}) == 0",
)
#: Where a step fills a global batch, so many micro-batches are recorded for each stage, and priced for all.
_RECORDED = "min(global_batch, 4 * {pp} * dp * {mbs})"
#: A flag, a variable, or a key of a file.
_PLACE = re.compile(r"--\S+|[A-Z_][A-Z0-9_]*|[^#\s]*#[^#\s]+")
#: The placeholder of a point's file.
_FILE = "config"
_EXAMPLE = "--auto tp=--tp --auto checkpoint=--checkpoint:full,none"


def with_axes(
    values: Mapping[str, object], program: JobProgram, settings: CommandLineSettings
) -> tuple[JobProgram, CommandLineSettings]:
    """The program with placeholders, and the settings with the axes and conditions of ``--auto``.

    Raises:
        SweepError: It names a framework, an axis or a file that is not known, or the world size is not one number.
    """
    texts = values["flags"]
    if not isinstance(texts, tuple) or not texts:
        return program, settings
    from fakedist.sweep.command import placeholders_of
    from fakedist.sweep.space import Expression

    places, (world, per_node) = _read(texts), _world(settings)
    point = _Point(places, program.arguments, settings.options)
    axes = _axes(places, point, settings, min(per_node, world))
    names = {axis.name for axis in axes}
    sizes = {name: name if name in names else "1" for name in _LARGEST}
    model, parts = [name for name in ("tp", "pp", "cp") if name in names], ["replicas"] * ("replicas" in names)
    sizes["parts"] = " * ".join((*model, *parts)) or "1"
    derived = [f"{name}={text}" for name, place in places.facts.items() if (text := point.number(place))]
    derived += [*settings.derived, f"dp={world} // ({' * '.join(model) or 1})", f"shards={world} // ({sizes['parts']})"]
    counts = dict(settings.settings)
    if places.batch and any(text.startswith("global_batch=") for text in derived):
        derived += [
            f"recorded_batch={_RECORDED.format(**sizes)}",
            "accumulated=recorded_batch // (dp * {mbs})".format(**sizes),
        ]
        counts["micro_batches"] = counts.get("micro_batches") or "global_batch // (dp * {mbs})".format(**sizes)
    known = names | {text.partition("=")[0] for text in derived}
    settable = {**{place: f"{{{name}}}" for name, place in places.sizes.items() if name in names}, **places.others}
    for place, pattern in {**settable, places.batch: "{recorded_batch}" if places.batch else ""}.items():
        if pattern and known.issuperset(placeholders_of(pattern)):
            point.put(place, pattern)
    if places.checkpoint:
        point.put(places.checkpoint_at, "{checkpoint}")
    legal = [text.format(world=world, per_node=min(per_node, world), **sizes) for text in (*_LEGAL, *places.legal)]
    return replace(program, arguments=point.arguments()), replace(
        settings,
        axes=(*axes, *settings.axes),
        derived=derived,
        conditions=(*(text for text in legal if Expression(text, "--auto:").names <= known), *settings.conditions),
        settings=counts,
        options=point.options(),
        files=point.files(),
        grows=_GROWS,
    )


class _Point:
    """Arguments, variables and a file of its own that every point gets, with placeholders."""

    def __init__(self, places: ScriptSettings, arguments: Sequence[str], options: Mapping[str, Texts | bool]) -> None:
        self._places, self._arguments, self._options = places, arguments, options
        given = options.get("env")
        texts = () if given is None or isinstance(given, bool) else given.texts
        self._variables = {name: value for name, _, value in (text.partition("=") for text in texts)}
        self._words: list[str] = []
        self._keys: dict[str, str] = {}
        self._path = ""

    def put(self, place: str, pattern: str) -> None:
        """Have a place, or an argument, set to a pattern. What no axis sets gives way to a variable that is given."""
        if "#" in place:
            self._keys[place] = pattern
        elif place and not place.startswith("--"):
            if "{" in pattern or place not in self._variables:
                self._variables[place] = pattern
        else:
            self._words += [place, pattern] if place else [pattern]

    def given(self, place: str) -> str | None:
        """The value that the command gives a place; None without one."""
        if "#" in place:
            value: object = self._content(place)
            for key in place.partition("#")[2].split("."):
                value = value.get(key) if isinstance(value, dict) else None
            return None if value is None else str(value)
        if not place.startswith("--"):
            return self._variables.get(place)
        pairs = pairwise((*self._arguments, ""))
        values = [word.partition("=")[2] or after for word, after in pairs if word.partition("=")[0] == place]
        return values[-1] if values else None

    def number(self, place: str) -> str:
        """The number that the command gives a place; empty without one."""
        text = self.given(place) or ""
        return text if text.isdecimal() else ""

    def arguments(self) -> tuple[str, ...]:
        """The command's arguments with those of the point, and with its file."""
        from fakedist.extras.plan.fitting import with_flags

        others = [word for ways in self._places.checkpoint.values() for word in ways]
        words = with_flags(self._arguments, self._words, others)
        return tuple(f"{word[: -len(self._path)]}{{{_FILE}}}" if self._names_file(word) else word for word in words)

    def options(self) -> dict[str, Texts | bool]:
        """The options of the command with the point's variables."""
        from fakedist.sweep.command import Texts

        texts = tuple(f"{name}={value}" for name, value in self._variables.items())
        return {**self._options, **({"env": Texts(texts)} if texts else {})}

    def files(self) -> tuple[PointFile, ...]:
        """The file of the point, if it sets a key."""
        from fakedist.sweep.command import PointFile

        if not self._keys:
            return ()
        changes = tuple((tuple(place.partition("#")[2].split(".")), pattern) for place, pattern in self._keys.items())
        return (PointFile(_FILE, Path(self._path).name, self._content(next(iter(self._keys))), changes),)

    def _content(self, place: str) -> Mapping[str, object]:
        """The content of the one file that keys are in.

        Raises:
            SweepError: No argument names it, there is another, or it cannot be read.
        """
        from fakedist.sweep.command import read_plain

        flags = self._places.file_flags
        path = place.partition("#")[0] or next((text for flag in flags if (text := self.given(flag))), "")
        if not path:
            raise SweepError(f"--auto: no argument names the file of {place[1:]}", f"{flags[0]} config.json")
        if self._path not in ("", path):
            raise SweepError(
                f"--auto sets keys of one file, not of {self._path} and {path}", "a sweep file can set more"
            )
        self._path = path
        if not any(map(self._names_file, self._arguments)):
            raise SweepError(
                f"--auto: no argument is {path}, so the script would not read a point's copy of it", f"--config {path}"
            )
        return read_plain(Path(path))

    def _names_file(self, word: str) -> bool:
        return bool(self._path) and (word == self._path or word.endswith(f"={self._path}"))


def _read(texts: Sequence[str]) -> ScriptSettings:
    """The places that texts name or give; those of an axis replace the ones of a framework."""
    places = ScriptSettings()
    for text in texts:
        name, equals, rest = text.partition("=")
        place, _, values = rest.partition(":")
        if text in _KNOWN:
            places = _KNOWN[text]
        elif not equals or name not in (*_LARGEST, _CHECKPOINT):
            known = [*_LARGEST, _CHECKPOINT] if equals else [*_KNOWN]
            raise SweepError(f"--auto has no {name}", did_you_mean(name, known) or f"it has {', '.join(known)}")
        elif not _PLACE.fullmatch(place) or (name == _CHECKPOINT and not values):
            raise SweepError(
                f"--auto {text!r} has no {'values' if _PLACE.fullmatch(place) else 'flag, variable or key'}", _EXAMPLE
            )
        elif name == _CHECKPOINT:
            is_flag = place.startswith("--")
            ways = {value: (place, value) if is_flag else (value,) for value in values.split(",")}
            places = replace(places, checkpoint=ways, checkpoint_at="" if is_flag else place)
        else:
            known_values = {**places.values, name: values} if values else places.values
            places = replace(places, sizes={**places.sizes, name: place}, values=known_values)
    return places


def _axes(places: ScriptSettings, point: _Point, settings: CommandLineSettings, per_node: int) -> list[Axis]:
    """The axes: not a rare one that the command lacks, nor one that a file leaves to the script (``"auto"``)."""
    from fakedist.sweep.space import Axis, axis_of_text

    asked = {text.partition("=")[0] for text in settings.axes if isinstance(text, str)}
    axes = [
        axis_of_text(f"{name}={places.values.get(name) or _VALUES.get(name) or f'1..{_LARGEST[name] or per_node}*2'}")
        for name, place in places.sizes.items()
        if (name not in places.rare or name in asked or point.given(place) is not None) and point.given(place) != "auto"
    ]
    return axes + [Axis(_CHECKPOINT, tuple(places.checkpoint), places.checkpoint)] * bool(places.checkpoint)


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
