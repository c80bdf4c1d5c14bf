"""Many steps of the recorded kinds, played through the caching allocator: out of memory by step N? No script runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fakedist.analysis.blocks import build_blocks
from fakedist.analysis.recording import read_recording
from fakedist.analysis.step_kinds import NUM_COUNTS, StepInput, StepKind, StepKinds, step_kinds, whole_recording
from fakedist.bounded import UnreadableError, read_bytes
from fakedist.errors import JobError, RunDirectoryError
from fakedist.results.opening import open_run_directory
from fakedist.results.router_draws import check_recorded, wilson
from fakedist.results.run import Run

Ints = npt.NDArray[np.int64]
#: Draws so many lengths with a generator.
Lengths = Callable[[np.random.Generator, int], Ints]
#: Plays steps of a program: :func:`fakedist.launcher.playing.play_steps`, of one that was written, and settings.
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
        raise JobError(f"{path} has something else than lengths", "whole numbers above 0, one a line")
    return [int(word[:9]) for word in words]


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
        """Write the program for gpu/player.py, whose plays have so many steps."""
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

    def steps(self, lengths: Ints, every: int = 0) -> Ints:
        """The rows that the player takes for steps of these lengths; the cache is emptied after each ``every``-th."""
        known, counts = {}, {}
        for length in np.unique(lengths).tolist():
            known[length] = self.kinds.nearest(length)
            samples = self.kinds.steps[known[length] - 1].input.samples
            counts[length] = StepInput(samples, length).counts()
        played = lengths.tolist()
        rows = [
            [known[length], int(every > 0 and not number % every), *counts[length], *counts[later]]
            for number, (length, later) in enumerate(zip(played, [*played[1:], played[-1]], strict=True), 1)
        ]
        return np.array(rows, np.int64)

    def recorded_steps(self) -> Ints:
        """The same for the recorded steps, in order."""
        rows = [[n, 0, *kind.counts] for n, kind in enumerate(self.kinds.steps, 1)]
        return np.array(rows, np.int64)

    @property
    def recorded_lengths(self) -> list[int]:
        """The length of each step that can be played."""
        return [kind.length for kind in self.kinds.steps]


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
        steps: A row a step of each seed: seed, step, length, peak_allocated_bytes, peak_reserved_bytes, num_mallocs (so
            far). Those after a failure are missing.
        settings: The recorded settings first.
        failure: The first failure of the first seed that has one; None without any.
    """

    playable: PlayableSteps
    lengths: str
    num_steps: int
    steps: pd.DataFrame
    settings: list[PlayedSetting]
    failure: FailedRequest | None

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
        table = playable.run.table("steps").set_index("step")
        recorded = table.loc[[kind.number for kind in playable.kinds.steps]]
        for column, name in enumerate(("peak_allocated_bytes", "peak_reserved_bytes")):
            if steps[:, column].tolist() != recorded[name].tolist():
                raise JobError(
                    f"played step by step, the run has {name} {steps[:, column].tolist()} instead of "
                    f"{recorded[name].tolist()}",
                    "this is a bug in fakedist",
                )


def play_long(
    playable: PlayableSteps, text: str | None, num_steps: int, seeds: Sequence[int], play: PlaySteps
) -> PlayedSteps:
    """Play so many steps with each seed, under the recorded settings of the allocator and under others."""
    draw = parse_lengths(text, playable.recorded_lengths)
    drawn = {seed: draw(np.random.default_rng(seed), num_steps) for seed in seeds}
    is_alike = len({lengths.tobytes() for lengths in drawn.values()}) == 1
    distinct = [*drawn.values()][:1] if is_alike else [*drawn.values()]
    settings: list[PlayedSetting] = []
    frames: list[pd.DataFrame] = []
    failure = None
    for name, conf, every in _settings(playable.alloc_conf):
        plays = list(play((playable.steps(lengths, every) for lengths in distinct), conf))
        plays = plays if len(distinct) == len(drawn) else plays * len(drawn)
        settings.append(_setting(name, plays, num_steps))
        if not frames:
            frames = [_frame(*both) for both in zip(drawn.items(), plays, strict=True)]
            failures = (
                _failure(playable, seed, lengths, outcome)
                for (seed, lengths), (outcome, _) in zip(drawn.items(), plays, strict=True)
                if outcome["failed_event"] >= 0
            )
            failure = next(failures, None)
    return PlayedSteps(playable, text or "the recorded ones", num_steps, pd.concat(frames), settings, failure)


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


def _frame(drawn: tuple[int, Ints], play: tuple[dict[str, int], Ints]) -> pd.DataFrame:
    (seed, lengths), (outcome, steps) = drawn, play
    number = len(steps) if outcome["failed_event"] < 0 else max(outcome["failed_step"], 0)
    return pd.DataFrame(
        {
            "seed": seed,
            "step": np.arange(1, number + 1),
            "length": lengths[:number],
            "peak_allocated_bytes": steps[:number, 0],
            "peak_reserved_bytes": steps[:number, 1],
            "num_mallocs": steps[:number, 3],
        }
    )


def _failure(playable: PlayableSteps, seed: int, lengths: Ints, outcome: dict[str, int]) -> FailedRequest:
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
        int(lengths[step]) if step >= 0 else 0,
        str(row["operation"]),
        str(lines.iloc[stack]) if stack >= 0 else "",
        outcome["requested_bytes"],
        outcome["allocated_bytes"],
        outcome["reserved_bytes"],
    )
