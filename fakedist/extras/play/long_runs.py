"""Many steps of the recorded kinds, played through the caching allocator: out of memory by step N? No script runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.recording import read_recording
from fakedist.bounded import UnreadableError, read_bytes
from fakedist.errors import JobError, RunDirectoryError
from fakedist.extras.play.player import play as play_program
from fakedist.extras.play.player import play_steps
from fakedist.extras.play.router_draws import check_recorded, wilson
from fakedist.extras.play.step_kinds import NUM_COUNTS, StepInput, StepKind, StepKinds, step_kinds, whole_recording
from fakedist.results.opening import open_run_directory
from fakedist.results.run import Run
from fakedist.temporary import scratch_directory

Ints = npt.NDArray[np.int64]
#: Draws so many lengths with a generator.
Lengths = Callable[[np.random.Generator, int], Ints]
#: Plays steps of a program: :func:`fakedist.extras.play.player.play_steps`, of one that was written, and settings.
PlaySteps = Callable[[Iterable[Ints], str], Iterator[tuple[dict[str, int], Ints]]]
#: The counts of a program that follows none.
NO_COUNTS = np.zeros(1, np.int64)
_EVERY = 10
#: What is played besides the recorded settings.
_SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:256",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:8",
)
_EMPTIED = f"empty_cache every {_EVERY} steps"


def parse_lengths(text: str | None, recorded: Sequence[int]) -> Lengths:
    """Lengths to draw: ``lognormal:MEAN,SIGMA,MAX``, a file of one a line, or (None) the recorded ones.

    Raises:
        JobError: It is neither.
    """
    if text is None or not text.startswith("lognormal:"):
        known = np.array(recorded if text is None else _read_lengths(Path(text)), np.int64)
        return lambda random, number: random.choice(known, number)
    found = re.fullmatch(r"lognormal:(\d+(?:\.\d+)?),(\d+(?:\.\d+)?),(\d+)", text)
    if found is None or float(found[1]) < 1 or int(found[3]) < 1:
        raise JobError(f"{text!r} is not lognormal:MEAN,SIGMA,MAX", "--lengths lognormal:1024,0.5,4096")
    mean, sigma, most = float(found[1]), float(found[2]), int(found[3])

    def lognormal(random: np.random.Generator, number: int) -> Ints:
        drawn = mean * np.exp(sigma * random.standard_normal(number) - sigma * sigma / 2)
        return np.clip(np.rint(drawn), 1, most).astype("i8")

    return lognormal


def _read_lengths(path: Path) -> list[int]:
    try:
        words = read_bytes(path, 1 << 24).decode(errors="replace").split()
    except (OSError, UnreadableError) as error:
        raise JobError(f"{path} cannot be read: {error}", "a file of lengths, one a line") from error
    if not words or not all(word.isdecimal() and int(word[:9]) > 0 for word in words):
        raise JobError(f"{path}: expected one length per line", "whole numbers above 0")
    return [int(word[:9]) for word in words]


def parse_every(texts: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Names of steps and how often each comes, from texts such as ``evaluation=100``.

    Raises:
        JobError: It is something else, or no step that can be played has the name.
    """
    found: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal() or int(number) < 2:
            raise JobError(f"expected NAME=N with N >= 2, got {text!r}", "--every evaluation=100")
        if name not in names:
            known = ", ".join(sorted(set(filter(None, names)))) or "none of them has a name"
            raise JobError(
                f"no recorded step that can be played is called {name!r} (names: {known})",
                'fakedist.step(name="evaluation") at its end names a step',
            )
        found[name] = int(number)
    return found


def name_sequence(recorded: Sequence[str], every: Mapping[str, int], number: int) -> list[str]:
    """The names of so many steps: those of ``every`` in each so many-th one, and the recorded cycle of the others.

    A cycle is what comes twice in a row. Without one, all are called what most recorded steps are.
    """
    others = [name for name in recorded if name not in every] or [""]
    periods = (n for n in range(1, len(others) // 2 + 1) if others[n:] == others[:-n])
    period = next(periods, 0)
    repeated = cycle(others[:period] if period else [max(others, key=others.count)])
    special = [[name for name, often in every.items() if not step % often] for step in range(1, number + 1)]
    return [found[0] if found else next(repeated) for found in special]


@dataclass(frozen=True)
class PlayableSteps:
    """A recorded run whose steps can be played in any order.

    Attributes:
        whole: All that was recorded.
        room_bytes: The GPU's memory less what is estimated to be outside of the allocator.
        blocks: The table of this name.
    """

    run: Run
    kinds: StepKinds
    whole: StepKind
    gpu: str
    room_bytes: int
    alloc_conf: str
    blocks: pd.DataFrame

    def write(self, path: Path, num_steps: int) -> None:
        """Write the program for player.py, whose plays have so many steps."""
        kinds = self.kinds
        num_streams = int(kinds.stream.max(initial=0))
        num_generations = 1 + int(kinds.age.max(initial=0))
        sizes = np.array([num_steps, NUM_COUNTS, len(kinds.age), num_generations, num_streams, self.room_bytes])
        arrays: dict[str, Any] = kinds.arrays()
        np.savez(path, sizes=sizes, gpu=np.array(self.gpu), **arrays)

    def write_whole(self, path: Path) -> None:
        """Write all that was recorded, as a program that follows no counts."""
        whole, names = self.whole, ("events", "base", "per", "follows")
        sizes = np.array([1, int(self.kinds.stream.max(initial=0)), self.room_bytes])
        arrays = {name: getattr(whole, name) for name in names}
        arrays |= {"stream": self.kinds.stream, "is_shared": self.kinds.is_shared}
        np.savez(path, sizes=sizes, gpu=np.array(self.gpu), **arrays)

    def steps(self, names: Sequence[str], lengths: Ints, every: int = 0) -> Ints:
        """The rows that the player takes for these steps; the cache is emptied after each ``every``-th."""
        played = list(zip(names, lengths.tolist(), strict=True))
        known = {(name, length): self.kinds.nearest(length, name) for name, length in set(played)}
        counts = {
            (name, length): StepInput(self.kinds.steps[kind - 1].input.samples, length).counts()
            for (name, length), kind in known.items()
        }
        rows = [
            [known[step], int(every > 0 and not number % every), *counts[step], *counts[later]]
            for number, (step, later) in enumerate(zip(played, [*played[1:], played[-1]], strict=True), 1)
        ]
        return np.array(rows, np.int64)

    def recorded_steps(self) -> Ints:
        """The rows that the player takes for the recorded steps, in order."""
        rows = [[n, 0, *kind.counts] for n, kind in enumerate(self.kinds.steps, 1)]
        return np.array(rows, np.int64)

    @property
    def names(self) -> list[str]:
        """The names of the steps that can be played, in their recorded sequence."""
        known = {kind.name for kind in self.kinds.steps}
        return [name for name in self.kinds.sequence if name in known]


def open_playable_steps(path: Path) -> PlayableSteps:
    """Open a recorded run to play its steps.

    Raises:
        RunDirectoryError: It is not a run directory, or is damaged.
        JobError: Its steps cannot be played.
    """
    run = open_run_directory(path)
    recording, job = read_recording(path), run.manifest.job
    if job is None or job.device != "virtual" or recording.gpu is None:
        raise JobError("the run is not one on the virtual GPU", "fakedist profile --device virtual --steps 20 ...")
    if job.gpu_lag != "none":
        raise JobError("blocks were kept as long as a GPU may lag, which is not played", "record it without --gpu-lag")
    if not run.summary.exit.ended_well and recording.beyond is None:
        raise RunDirectoryError("the run ended before its last step", "play a run that finished its steps")
    blocks = build_blocks(recording)
    outside = run.summary.estimated_outside
    return PlayableSteps(
        run,
        step_kinds(recording, blocks, run.table("steps")),
        whole_recording(recording, blocks),
        job.gpu,
        recording.gpu.capacity_bytes - (0 if outside is None else outside.low_bytes),
        recording.gpu.alloc_conf,
        run.table("blocks"),
    )


@dataclass(frozen=True)
class FailedRequest:
    """The request that did not fit: its step, what it is for, and what was held."""

    seed: int
    step: int
    name: str
    length: int
    operation: str
    line: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class PlayedSetting:
    """The plays of all seeds under settings of the allocator.

    Attributes:
        failed_steps: The step of the first failure of each seed that has one.
        num_mallocs: cudaMalloc calls of a step, mean.
    """

    name: str
    num_seeds: int
    failed_steps: list[int]
    peak_reserved_bytes: int
    num_mallocs: float


@dataclass(frozen=True)
class PlayedSteps:
    """Many played steps.

    Attributes:
        names: Of each played step, its name.
        steps: A row a step of each seed: seed, step, name, length, peak_allocated_bytes, peak_reserved_bytes,
            num_mallocs (so far). Those after a failure are missing.
        settings: The recorded settings first.
        failure: The first failure of the first seed that has one; None without any.
    """

    playable: PlayableSteps
    lengths: str
    names: list[str]
    steps: pd.DataFrame
    settings: list[PlayedSetting]
    failure: FailedRequest | None

    @property
    def num_steps(self) -> int:
        """Steps that each seed plays."""
        return len(self.names)

    @property
    def sequence_texts(self) -> list[str]:
        """How often each name that some recorded step has comes among the played steps."""
        texts = []
        for name in sorted(set(filter(None, self.playable.kinds.sequence))):
            at = [kind.number for kind in self.playable.kinds.steps if kind.name == name]
            recorded = f"recorded in {', '.join(map(str, at))}" if at else "cannot be played"
            texts.append(f"{name}, {self.names.count(name):,} of {self.num_steps:,} steps ({recorded})")
        return texts

    @property
    def without_memory(self) -> tuple[float, float, float]:
        """The part of the seeds that run out of memory, and the interval of its probability (Wilson, 95%)."""
        own = self.settings[0]
        return wilson(len(own.failed_steps), own.num_seeds)


def check_steps(playable: PlayableSteps, whole: dict[str, int], steps: Ints) -> None:
    """Compare what was recorded, played as a whole and, if every step can be played, step by step, with the recording.

    ``steps`` are the recorded steps, played, by ``player.STEP``.

    Raises:
        JobError: The peaks are not those of the recording.
    """
    check_recorded(playable.run, whole)
    if playable.kinds.is_whole and whole["failed_event"] < 0:
        recorded = playable.kinds.peaks.tolist()
        if steps[:, :2].tolist() != recorded:
            raise JobError(
                f"played step by step, the run has the peaks {steps[:, :2].tolist()} instead of {recorded}",
                "this is a bug in fakedist",
            )


@contextmanager
def checked_player(playable: PlayableSteps, num_steps: int) -> Iterator[PlaySteps]:
    """A player of so many steps, for as long as the context lasts.

    Raises:
        JobError: The peaks of what was recorded are not those of the recording.
    """
    with scratch_directory("play") as folder:
        whole, recorded, program = (folder / f"{name}.npz" for name in ("whole", "recorded", "program"))
        playable.write_whole(whole)
        playable.write(recorded, len(playable.kinds.steps))
        playable.write(program, num_steps)
        conf = playable.alloc_conf
        (as_whole,) = play_program(whole, [NO_COUNTS], conf)
        ((_, by_step),) = play_steps(recorded, [playable.recorded_steps()], conf)
        check_steps(playable, as_whole, by_step)
        yield lambda rows, conf: play_steps(program, rows, conf)


def fitting_steps(playable: PlayableSteps, num_steps: int, seeds: Sequence[int]) -> float:
    """The part of the steps that have enough memory, of sequences of the recorded lengths; each ends at its first lack.

    Raises:
        JobError: All recorded steps have one length, or the peaks of what was recorded are not those of the recording.
    """
    lengths = [kind.length for kind in playable.kinds.steps]
    if len(set(lengths)) < 2:
        raise JobError("the recorded steps have one length, so that none can be drawn", "--steps 20 records more")
    names, draw = name_sequence(playable.names, {}, num_steps), parse_lengths(None, lengths)
    rows = (playable.steps(names, draw(np.random.default_rng(seed), num_steps)) for seed in seeds)
    with checked_player(playable, num_steps) as play:
        failed = [
            outcome["failed_step"] for outcome, _ in play(rows, playable.alloc_conf) if outcome["failed_event"] >= 0
        ]
    fitting = num_steps * (len(seeds) - len(failed)) + sum(max(step, 0) for step in failed)
    return fitting / (fitting + len(failed))


def play_long(
    playable: PlayableSteps, text: str | None, names: list[str], seeds: Sequence[int], play: PlaySteps
) -> PlayedSteps:
    """Play steps of these names with each seed, under the recorded settings of the allocator and under others."""
    num_steps = len(names)
    draw = parse_lengths(text, [kind.length for kind in playable.kinds.steps])
    drawn = {seed: draw(np.random.default_rng(seed), num_steps) for seed in seeds}
    is_alike = len({lengths.tobytes() for lengths in drawn.values()}) == 1
    distinct = [*drawn.values()][:1] if is_alike else [*drawn.values()]
    settings: list[PlayedSetting] = []
    frames: list[pd.DataFrame] = []
    failure = None
    for name, conf, every in _settings(playable.alloc_conf):
        plays = list(play((playable.steps(names, lengths, every) for lengths in distinct), conf))
        plays = plays if len(distinct) == len(drawn) else plays * len(drawn)
        settings.append(_setting(name, plays, num_steps))
        if not frames:
            frames = [_frame(names, *both) for both in zip(drawn.items(), plays, strict=True)]
            failures = (
                _failure(playable, names, (seed, lengths), outcome)
                for (seed, lengths), (outcome, _) in zip(drawn.items(), plays, strict=True)
                if outcome["failed_event"] >= 0
            )
            failure = next(failures, None)
    return PlayedSteps(playable, text or "the recorded ones", names, pd.concat(frames), settings, failure)


def _settings(conf: str) -> list[tuple[str, str, int]]:
    """Name, settings of the allocator, and after how many steps the cache is emptied; the recorded ones first."""
    own = [part for part in re.split(r",(?![^\[]*\])", conf) if part.strip()]
    found = [(conf or "as recorded", conf, 0)]
    for setting in _SETTINGS:
        name = setting.partition(":")[0]
        others = [part for part in own if part.partition(":")[0].strip() != name]
        if setting not in own:
            found.append((setting, ",".join([*others, setting]), 0))
    return [*found, (_EMPTIED, conf, _EVERY)]


def _setting(name: str, plays: Sequence[tuple[dict[str, int], Ints]], num_steps: int) -> PlayedSetting:
    failed = [outcome["failed_step"] + 1 for outcome, _ in plays if outcome["failed_event"] >= 0]
    reserved = max(max(outcome["reserved_bytes"], int(steps[:, 1].max(initial=0))) for outcome, steps in plays)
    played = [num_steps if outcome["failed_event"] < 0 else max(outcome["failed_step"], 0) for outcome, _ in plays]
    mallocs = sum(int(steps[number - 1, 3]) for (_, steps), number in zip(plays, played, strict=True) if number)
    return PlayedSetting(name, len(plays), failed, reserved, mallocs / max(sum(played), 1))


def _frame(names: list[str], drawn: tuple[int, Ints], play: tuple[dict[str, int], Ints]) -> pd.DataFrame:
    (seed, lengths), (outcome, steps) = drawn, play
    number = len(steps) if outcome["failed_event"] < 0 else max(outcome["failed_step"], 0)
    return pd.DataFrame(
        {
            "seed": seed,
            "step": np.arange(1, number + 1),
            "name": names[:number],
            "length": lengths[:number],
            "peak_allocated_bytes": steps[:number, 0],
            "peak_reserved_bytes": steps[:number, 1],
            "num_mallocs": steps[:number, 3],
        }
    )


def _failure(
    playable: PlayableSteps, names: list[str], drawn: tuple[int, Ints], outcome: dict[str, int]
) -> FailedRequest:
    seed, lengths = drawn
    kinds = [playable.kinds.before, *playable.kinds.steps]
    step, event = outcome["failed_step"], outcome["failed_event"]
    first = np.cumsum([0, *(len(kind.events) for kind in kinds)])
    number = int(np.searchsorted(first, event, "right")) - 1
    kind = kinds[number]
    row = playable.blocks.iloc[int(kind.block[kind.events[event - first[number]]])]
    lines, stack = playable.run.table("stacks")["line"], int(row["stack"])
    return FailedRequest(
        seed,
        step + 1,
        names[step] if step >= 0 else "",
        int(lengths[step]) if step >= 0 else 0,
        str(row["operation"]),
        str(lines.iloc[stack]) if stack >= 0 else "",
        outcome["requested_bytes"],
        outcome["allocated_bytes"],
        outcome["reserved_bytes"],
    )
