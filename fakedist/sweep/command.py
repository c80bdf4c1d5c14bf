"""What a point runs: the command with its placeholders filled, and what its step is priced for."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fakedist.errors import FakedistError, SweepError, did_you_mean
from fakedist.gpu_models.known import find_gpu
from fakedist.gpu_models.spec import GPU_FILE_ENDING
from fakedist.job import Door, Job, Program, make_jobs
from fakedist.job.making import option_named
from fakedist.run.plain import from_plain
from fakedist.sweep.axes import Axis, Scalar, text_of
from fakedist.sweep.placeholders import Filling, Texts, placeholders_of
from fakedist.sweep.point_files import PointFile
from fakedist.sweep.space import Point, Space

#: Options of a job that only estimated times follow. With a placeholder they are priced, and nothing runs again.
_ONLY_PRICES = {"fabric": "fabric", "gpu_power": "power_watts", "times": "times"}
#: What ``price`` can name: arguments of ``Run.priced_for`` that are no option of a job, or that differ from it.
PRICES = ("gpus_per_node", "moe_imbalance")
#: Clocks change times and nothing that the script sees.
_CLOCKS = ("clock_khz", "memory_clock_khz")


@dataclass(frozen=True)
class PricedFor:
    """What a point's step is priced for. None leaves the run's own.

    Attributes:
        gpu: The GPU model, or a GPU file.
        power_watts: Its power limit.
        times: A file that ``fakedist calibrate`` wrote.
        fabric: The interconnect.
        gpus_per_node: GPUs in one NVLink domain.
        moe_imbalance: The busiest rank's part of an all_to_all and of grouped products, in even shares.
    """

    gpu: str | None = None
    power_watts: float | None = None
    times: str | None = None
    fabric: str | None = None
    gpus_per_node: int | None = None
    moe_imbalance: float = 1.0


@dataclass(frozen=True)
class PointRun:
    """What a point runs.

    Attributes:
        point: The point.
        job: The job of rank 0. The paths of its files are still placeholders.
        pricing: What its step is priced for.
        files: The text of each file by its placeholder and name.
    """

    point: Point
    job: Job
    pricing: PricedFor
    files: tuple[tuple[PointFile, str], ...]

    def placed(self, directory: Path) -> Job:
        """The job with its files in a directory."""
        paths = {_mark(file, text): os.fspath(directory / file.file_name) for file, text in self.files}

        def put(value: str) -> str:
            for mark, path in paths.items():
                value = value.replace(mark, path)
            return value

        arguments = tuple(put(each) for each in self.job.arguments)
        environment = tuple((name, put(value)) for name, value in self.job.environment)
        return dataclasses.replace(self.job, arguments=arguments, environment=environment)

    def write_files(self, directory: Path) -> None:
        """Write the point's files into a directory."""
        for file, text in self.files:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / file.file_name).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class SweptCommand:
    """What every point runs, with placeholders.

    Attributes:
        program: The script or module and its arguments.
        options: Plain values of the job's options by name, or what the command line gave for them.
        files: Files that are written for each point.
        price: What the step is priced for, by the names of ``PRICES``.
        door: Where the options were given.
        directory: The directory to which paths are relative.
    """

    program: Program
    options: Mapping[str, object]
    files: tuple[PointFile, ...] = ()
    price: Mapping[str, object] = field(default_factory=dict)
    door: Door = Door.TOML
    directory: str = ""

    def check(self, space: Space) -> None:
        """Check that every placeholder has a value and every axis has a placeholder.

        Raises:
            SweepError: One has not.
        """
        known = [*space.names, *(file.name for file in self.files)]
        used: set[str] = set()
        for where, pattern in self._places():
            for name in placeholders_of(pattern):
                used.add(name)
                if name not in known:
                    close = did_you_mean(name, known) if known else ""
                    raise SweepError(
                        f"unknown placeholder {{{name}}} in {where}",
                        f"{close or f'add an axis {name}'}; write {{{{{name}}}}} for the text {{{name}}} itself",
                    )
        behind = space.axes_behind(iter(used))
        for axis in space.axes:
            if axis.name not in behind:
                raise SweepError(
                    f"axis {axis.name} is used nowhere: it has no placeholder in an argument, an option or a file",
                    f"write {{{axis.name}}} where its value belongs, or leave the axis out",
                )
        for file in self.files:
            if file.name not in used:
                raise SweepError(
                    f"the file {file.name} is used nowhere",
                    f'write {{{file.name}}} for its path: "--config={{{file.name}}}"',
                )

    def at(self, space: Space, point: Point) -> PointRun:
        """What a point runs.

        Raises:
            SweepError: A value is not valid there.
        """
        words = {axis.name: axis.arguments[str(value)] for axis, (_, value) in _pairs(space, point) if axis.arguments}
        filling = Filling(space.named_values(point), words)
        files = tuple((file, file.text(filling)) for file in self.files)
        marks: dict[str, Scalar] = {file.name: _mark(file, text) for file, text in files}
        with_files = Filling({**filling.values, **marks}, words)
        try:
            priced, options = self._options(with_files)
            program = dataclasses.replace(self.program, arguments=with_files.command(self.program.arguments))
            (job,) = make_jobs(program, options, self.door, self.directory)
            job, gpu = self._shared_gpu(space, job)
            pricing = from_plain(PricedFor, {**_prices(self.price, with_files), **priced, "gpu": gpu})
        except FakedistError as error:
            raise SweepError(f"at {point.label}: {error.message}", error.hint) from None
        if job.device == "cuda" or job.nsys:
            raise SweepError("a sweep runs on the virtual GPU", "leave out --device cuda and --nsys")
        return PointRun(point, job, pricing, files)

    def _options(self, filling: Filling) -> tuple[dict[str, object], dict[str, object]]:
        """What the point is priced for by options of the job, and the job's other options, as plain values."""
        priced: dict[str, object] = {}
        options: dict[str, object] = {}
        for name, pattern in self.options.items():
            plain = filling.plain(pattern)
            if isinstance(plain, Texts):
                plain = option_named(name).read_texts(plain.texts)
            if name in ("env", "nccl_env") and isinstance(plain, dict):
                plain = {key: text_of(value) if isinstance(value, bool) else value for key, value in plain.items()}
            if name in _ONLY_PRICES and any(placeholders_of(pattern)):
                stored = option_named(name).read(plain, self.door)
                if name != "gpu_power":
                    stored = self._path(str(stored))
                priced[_ONLY_PRICES[name]] = stored
            else:
                options[name] = plain
        return priced, options

    def _shared_gpu(self, space: Space, job: Job) -> tuple[Job, str | None]:
        """The job on the first GPU of its axis that a script cannot tell from its own, and its own if that differs."""
        pattern = self.options.get("gpu")
        (text,) = pattern.texts[-1:] if isinstance(pattern, Texts) else (pattern,)
        names = list(placeholders_of(text))
        axis = next((each for each in space.axes if names == [each.name] and text == f"{{{each.name}}}"), None)
        if axis is None or axis.arguments:
            return job, None
        same = _seen_by_script(job.gpu, job.gpu_memory_bytes)
        first = next(
            found
            for found in (self._path(str(value)) for value in axis.values)
            if _seen_by_script(found, job.gpu_memory_bytes) == same
        )
        return dataclasses.replace(job, gpu=first), None if first == job.gpu else job.gpu

    def _path(self, value: str) -> str:
        """A value that may be a path, made absolute if it is."""
        is_path = value.lower().endswith(GPU_FILE_ENDING) or value.endswith(".json")
        return os.path.abspath(os.path.join(self.directory, value)) if is_path else value

    def _places(self) -> list[tuple[str, object]]:
        """Everything that may have placeholders, with what it is called."""
        found: list[tuple[str, object]] = [("the arguments", list(self.program.arguments))]
        found += [(f"the option {option_named(name).called(self.door)}", each) for name, each in self.options.items()]
        found += [(f"the file {file.name}", [value for _, value in file.changes]) for file in self.files]
        return [*found, *((f"price {name}", value) for name, value in self.price.items())]


def _pairs(space: Space, point: Point) -> list[tuple[Axis, tuple[str, Scalar]]]:
    return list(zip(space.axes, point.values, strict=True))


def _mark(file: PointFile, text: str) -> str:
    """What stands for a file's path until it has one: the same for the same content."""
    return f"<{file.file_name}:{hashlib.sha256(text.encode()).hexdigest()[:24]}>"


def _seen_by_script(gpu: str, memory_bytes: int | None) -> tuple[object, ...]:
    """What a script can see of a GPU, other than its clocks."""
    spec = find_gpu(gpu)
    fields = {name: value for name, value in spec.driver_fields().items() if name not in _CLOCKS}
    return (spec.product, memory_bytes or spec.memory_bytes, spec.compute_capability, tuple(fields.items()))


def _prices(price: Mapping[str, object], filling: Filling) -> dict[str, object]:
    per_node, imbalance = (filling.plain(price.get(name)) for name in PRICES)
    if per_node is not None and (not isinstance(per_node, int) or isinstance(per_node, bool) or per_node < 1):
        raise SweepError(f"price gpus_per_node is a whole number of 1 or more, not {per_node!r}", "gpus_per_node = 8")
    imbalance = 1.0 if imbalance is None else imbalance
    if not isinstance(imbalance, int | float) or isinstance(imbalance, bool) or not 1 <= imbalance <= 1000:
        raise SweepError(f"price moe_imbalance is a number from 1 to 1,000, not {imbalance!r}", "moe_imbalance = 1.5")
    return {"gpus_per_node": per_node, "moe_imbalance": float(imbalance)}
