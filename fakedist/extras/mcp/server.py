"""The tools that an agent sees.

Each runs a command of fakedist and answers with the data of its report. READING and RUNNING are the registry: a new
command becomes a tool as a method of :class:`Tools` that is named in one of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

from fakedist._version import __version__
from fakedist.errors import JobError
from fakedist.findings.rule_pages import page_of
from fakedist.launcher.machine import ProcessTree, rss_bytes
from fakedist.units import format_bytes
from fakedist.visible import visible, visible_lines

_POLL_S = 0.2
_PROGRESS_S = 1.0
#: How long a command may take to end its ranks, once it gets SIGTERM.
_END_S = 15.0
#: Of what a command printed on stderr, an answer has these last characters.
_TAIL_CHARACTERS = 2_000

Progress = Callable[[float, str], Awaitable[None]]


@dataclass(frozen=True)
class Limits:
    """Limits of one command and all that it starts."""

    seconds: int
    memory_bytes: int


@dataclass(frozen=True)
class Answered:
    """A command that has ended.

    Attributes:
        data: The object that it printed; None if it printed none.
        log_tail: The end of what it and the script printed.
        exceeded: The limit that ended it, in words; empty if none did.
    """

    code: int
    data: Any
    log_tail: str
    exceeded: str


async def run_command(
    words: Sequence[str], project: Path, limits: Limits, progress: Progress, output: Path | None
) -> Answered:
    """Run ``fakedist WORDS --json`` in the project. What the script prints goes into a file, if one is named."""
    command = [sys.executable, "-P", "-m", "fakedist", *words]  # a module of the project must not stand for Python's
    with (
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() if output is None else output.open("w+b") as log,
    ):
        process = await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=log, cwd=project, start_new_session=True
        )
        try:
            exceeded = await _follow(process, limits, progress, log.fileno())
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
        tail = _tail(log.fileno())
        printed.seek(0)
        data = None
        with suppress(ValueError):
            data = json.loads(printed.read())
        return Answered(process.returncode or 0, data, tail, exceeded)


async def _follow(process: Process, limits: Limits, progress: Progress, log: int) -> str:
    """Wait for a process's end. Returns the limit that it exceeded; it then still runs."""
    begin = time.monotonic()
    tree, next_progress = ProcessTree(process.pid), _PROGRESS_S
    while process.returncode is None:
        await anyio.sleep(_POLL_S)
        seconds = time.monotonic() - begin
        if seconds > limits.seconds:
            return f"it took longer than {limits.seconds:,} s: fakedist mcp --time-limit SECONDS allows more"
        if rss_bytes(process.pid) + tree.rss_bytes() > limits.memory_bytes:
            most = format_bytes(limits.memory_bytes)
            return f"it held more than {most} of memory: fakedist mcp --memory-limit SIZE allows more"
        if seconds >= next_progress:
            next_progress = seconds + _PROGRESS_S
            await progress(seconds, _tail(log).rpartition("\n")[2])
    return ""


async def _end(process: Process) -> None:
    """End a process that still runs, and all that it started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(_END_S):
            await process.wait()
    if process.returncode is None:
        await anyio.to_thread.run_sync(ProcessTree(process.pid).kill)
        process.kill()
        await process.wait()


def _tail(file: int) -> str:
    """The last lines of a file that another process writes, safe to show."""
    size = os.fstat(file).st_size
    text = os.pread(file, _TAIL_CHARACTERS, max(0, size - _TAIL_CHARACTERS)).decode(errors="replace")
    return visible_lines(text.strip())


READING = ("runs", "report", "explain", "lines", "time", "compare", "match", "doctor")
RUNNING = ("profile", "sweep", "check")
_INSTRUCTIONS = """fakedist runs one rank of a distributed PyTorch job on a virtual GPU, and reports its memory to the
byte and its estimated time. Begin with `runs`. Bytes are bytes, times microseconds. An answer's `data` is the report's;
`sections` names parts that were left out of it: ask for one with `section`. `notes` says what is not known or made up.
"""
#: Characters of JSON of an answer, and of a part of one that is larger.
_MOST = 20_000
_MOST_OF_A_PART = 1_500
_NAME = re.compile(r"[A-Za-z0-9][\w.,:+=-]*")

Object = dict[str, Any]


def make_server(project: Path, limits: Limits, *, may_run: bool) -> MCPServer:
    """A server for one project, with the tools that run scripts if it may."""
    server = MCPServer("fakedist", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR")
    tools = Tools(project, limits)
    for name in READING:
        server.add_tool(getattr(tools, name), annotations=ToolAnnotations(read_only_hint=True))
    for name in RUNNING if may_run else ():
        server.add_tool(getattr(tools, name), annotations=ToolAnnotations(read_only_hint=False))
    return server


class Tools:
    """The tools. Paths are below the project, also through symlinks; nothing is replaced or deleted."""

    def __init__(self, project: Path, limits: Limits) -> None:
        self._project, self._limits = project.resolve(), limits

    async def runs(self, context: Context) -> Object:
        """List the project's runs, the newest first: paths, ages, jobs, verdicts and sizes."""
        return await self._answer(context, ["runs"], "")

    async def explain(self, code: str) -> Object:
        """Explain the rule of a finding such as "FD101": why the fault matters, how it is seen, what mends it."""
        try:
            return {"data": page_of(code)}
        except JobError as error:
            raise ToolError(f"{error.message}; {error.hint}") from None

    async def report(self, context: Context, run: str, section: str = "") -> Object:
        """Report a finished run, or a file of a real GPU: whether it fits, the peak, findings, layers, time, advice.

        section: a part of the data such as "findings", "advice", "time" or "time.kernels".
        """
        return await self._answer(context, ["report", self._path(run)], section)

    async def lines(self, context: Context, run: str, section: str = "") -> Object:
        """Report each source line's bytes at the peak, and the time of the kernels that it launches."""
        return await self._answer(context, ["lines", self._path(run)], section)

    async def time(self, context: Context, run: str, gpu: str = "", fabric: str = "", section: str = "") -> Object:
        """Estimate a run's step on other GPUs or networks, without running it: gpu "h100,b200", fabric "p5-efa"."""
        options = self._options(gpu=gpu, fabric=fabric)
        return await self._answer(context, ["time", self._path(run), *options], section)

    async def compare(self, context: Context, before: str, after: str, section: str = "") -> Object:
        """Report what changed between two runs, or between a run and a file of a real GPU, and why."""
        return await self._answer(context, ["compare", self._path(before), self._path(after)], section)

    async def match(self, context: Context, runs: str, section: str = "") -> Object:
        """Report whether the calls of a job's ranks match, or where they hang.

        runs: a directory of several ranks' runs, or of the Flight Recorder's dumps of a job that hung.
        """
        return await self._answer(context, ["match", self._path(runs)], section)

    async def doctor(self, context: Context) -> Object:
        """Report what works on this machine, and what to type for what does not."""
        return await self._answer(context, ["doctor"], "")

    async def profile(
        self,
        context: Context,
        script: str,
        world_size: int,
        *,
        arguments: list[str] | None = None,
        rank: str = "0",
        gpu: str = "",
        gpu_memory: str = "",
        fabric: str = "",
        output: str = "",
    ) -> Object:
        """Run one rank of a job, unmodified, and report its memory and time.

        script and arguments: as for torchrun. rank: one, several ("0,7"), "stages" or "distinct". output: the new run
        directory.
        """
        directory = ["--output", self._path(output, exists=False)] if output else []
        options = self._options(world_size=world_size, rank=rank, gpu=gpu, gpu_memory=gpu_memory, fabric=fabric)
        words = ["profile", *options, *directory, self._path(script), *(arguments or [])]
        return await self._answer(context, words, "", runs_script=True)

    async def sweep(
        self,
        context: Context,
        script: str,
        *,
        world_size: int = 0,
        axes: list[str] | None = None,
        arguments: list[str] | None = None,
        gpu: str = "",
    ) -> Object:
        """Run a job at every point of a space, and rank the points that fit by their time.

        script: a sweep file (sweep.toml), or a script with axes such as "tp=1,2,4" and arguments with "{tp}".
        """
        options = self._options(world_size=world_size or "", gpu=gpu)
        options += [f"--axis={axis}" for axis in axes or []]
        path = Path(self._path(script))
        if path.is_file():  # a sweep's directory only prints what it has
            directory = f".fakedist/sweep-{path.name.partition('.')[0]}"
            self._path(directory, exists=False)  # it may be a symlink that leads elsewhere
            options.append(f"--output={directory}")
        return await self._answer(context, ["sweep", *options, str(path), *(arguments or [])], "", runs_script=True)

    async def check(self, context: Context, jobs: list[str] | None = None, config: str = "pyproject.toml") -> Object:
        """Run the project's jobs against their budgets and baselines; without names, all of them."""
        words = ["check", "--no-annotations", f"--config={self._path(config)}", *map(_name, jobs or [])]
        return await self._answer(context, words, "", runs_script=True)

    async def _answer(self, context: Context, words: list[str], section: str, *, runs_script: bool = False) -> Object:
        command, *others = words

        async def progress(seconds: float, message: str) -> None:
            await context.report_progress(seconds, message=message)

        output = self._new_output(command) if runs_script else None
        done = await run_command([command, "--json", *others], self._project, self._limits, progress, output)
        kept = {} if output is None else {"output": str(output)}
        if done.exceeded or not isinstance(done.data, dict):
            more = f"\nThe whole output: {output}" if output else ""
            raise ToolError(f"{done.exceeded or 'fakedist failed'} (exit {done.code})\n{done.log_tail}{more}")
        not_known = done.data.get("notes") or done.data.get("remarks") or []
        answer = fitting(_section(done.data, section), section)
        ended = {"exit": done.code, "said": done.log_tail} if done.code else {}
        return answer | {"not_known": not_known, "command": shlex.join(["fakedist", *words])} | ended | kept

    def _new_output(self, command: str) -> Path:
        """A new file for what a command and its script print, below the project."""
        folder = Path(self._path(".fakedist/mcp", exists=False))
        folder.mkdir(parents=True, exist_ok=True)
        file, path = tempfile.mkstemp(".txt", f"{time.strftime('%Y%m%d-%H%M%S')}-{command}-", folder)
        os.close(file)
        return Path(path)

    def _options(self, **values: str | int) -> list[str]:
        """Options of names and numbers. A file of the project may stand for a name, one elsewhere may not."""
        options = []
        for name, value in values.items():
            if value != "":
                text = _name(str(value))
                for part in text.split(","):
                    self._path(part, exists=False)
                options.append(f"--{name.replace('_', '-')}={text}")
        return options

    def _path(self, text: str, *, exists: bool = True) -> str:
        """A path below the project, without symlinks. ToolError if it leads elsewhere or does not exist."""
        with suppress(OSError, ValueError):  # a name that is too long or has a NUL character names no file
            path = (self._project / text).resolve()
            if not path.is_relative_to(self._project):
                raise ToolError(f"{text} is outside of the project {self._project}; name a path below it")
            if not exists or path.exists():
                return str(path)
        raise ToolError(f"{visible(text, 200)} does not exist in {self._project}; the tool runs lists the runs")


def fitting(data: Any, section: str = "") -> Object:
    """An answer with data that an agent can take in: of an object its small parts, of a list its first rows.

    ``sections`` has the characters of each part left out, by its name; ``rows_left_out`` counts.
    """
    if len(json.dumps(data)) <= _MOST:
        return {"data": data}
    if isinstance(data, dict):
        sizes = {name: len(json.dumps(part)) for name, part in data.items()}
        left_out = {f"{section}.{name}".strip("."): size for name, size in sizes.items() if size > _MOST_OF_A_PART}
        small = {name: part for name, part in data.items() if sizes[name] <= _MOST_OF_A_PART}
        return {"data": small, "sections": left_out}
    if not isinstance(data, list):
        return {"data": str(data)[:_MOST]}
    ends = list(accumulate(len(json.dumps(row)) + 2 for row in data))
    number = bisect_right(ends, _MOST)
    return {"data": data[:number], "rows_left_out": len(data) - number}


def _section(data: Any, section: str) -> Any:
    """A part of a report's data by its dotted name. ToolError names those that there are."""
    for name in section.split(".") if section else ():
        if not isinstance(data, dict) or name not in data:
            names = ", ".join(data) if isinstance(data, dict) else "none"
            raise ToolError(f"there is no section {section}: {name!r} is not one of {names}")
        data = data[name]
    return data


def _name(text: str) -> str:
    """A name or a number, which cannot pass for an option. ToolError for anything else."""
    if not _NAME.fullmatch(text):
        raise ToolError(f"{text!r} is not a name: expected letters, digits and . , : + = - after a letter or digit")
    return text
