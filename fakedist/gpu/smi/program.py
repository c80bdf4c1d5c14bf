"""The program ``nvidia-smi``: answers one call.

An environment variable describes the GPUs. If the script cleared its environment, the program reads the variable from
a parent process. It appends calls that it answers with constants of an idle GPU, and calls that it refuses, to a file
in the run directory. The report's notes count them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field

from fakedist.gpu.smi.fields import (
    ALIASES,
    INVALID_QUERY,
    NO_DRIVER,
    NOT_AVAILABLE,
    NOT_FOUND,
    Gpu,
    Machine,
    NoAnswerError,
    known_field,
    refused,
)
from fakedist.gpu.smi.pages import long_form, table
from fakedist.run.smi_calls import CONSTANT, REFUSED, write_call

#: Holds a :class:`Machine`.
VARIABLE = "FAKEDIST_NVIDIA_SMI"

#: Header of each field of a process. No process is listed, because what other processes hold is unknown.
_APPS = {
    "timestamp": "timestamp",
    "gpu_name": "gpu_name",
    "gpu_bus_id": "gpu_bus_id",
    "gpu_serial": "gpu_serial",
    "gpu_uuid": "gpu_uuid",
    "pid": "pid",
    "process_name": "process_name",
    "name": "process_name",
    "used_gpu_memory": "used_gpu_memory [MiB]",
    "used_memory": "used_gpu_memory [MiB]",
}
_VALUED = {"-i": "--id", "-d": "--display"}
_FLAGS = {"-L": "--list-gpus", "-q": "--query", "-h": "--help"}

_HELP = f"""nvidia-smi of fakedist's virtual GPU. What the model of --gpu does not define is a constant of an idle GPU.

    nvidia-smi [-i ID]
    nvidia-smi -L [-i ID]
    nvidia-smi -q [-d SECTION,...] [-i ID]
    nvidia-smi --query-gpu=FIELD,... --format=csv[,noheader][,nounits] [-i ID]
    nvidia-smi --query-compute-apps=FIELD,... --format=csv[,noheader][,nounits]
    nvidia-smi --version

    ID: index, UUID or PCI bus ID; separate several with commas. All other calls fail with exit code {INVALID_QUERY}.
"""


@dataclass
class Asked:
    """A command line.

    Attributes:
        values: Options with a value.
        flags: Options without.
    """

    values: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)

    @classmethod
    def parse(cls, arguments: list[str]) -> Asked:
        """Parse arguments. Options get their long names.

        Raises:
            NoAnswerError: An option is unknown or lacks its value.
        """
        asked, rest = cls(), list(arguments)
        while rest:
            name, equals, value = rest.pop(0).partition("=")
            name = _VALUED.get(name, _FLAGS.get(name, name))
            if name in ("--query-gpu", "--query-compute-apps", "--format", *_VALUED.values()):
                if not equals and not rest:
                    raise NoAnswerError(INVALID_QUERY, stderr=f"nvidia-smi: {name} needs a value\n")
                asked.values[name] = value if equals else rest.pop(0)
            elif name in (*_FLAGS.values(), "--version", "--help-query-gpu") and not equals:
                asked.flags.add(name)
            else:
                raise refused(shlex.join(arguments))
        return asked

    def format(self) -> tuple[bool, bool]:
        """Whether the output has a header, and whether it has units.

        Raises:
            NoAnswerError: The format is not CSV.
        """
        words = {word.strip() for word in self.values.get("--format", "").split(",")}
        if "csv" not in words or words - {"csv", "noheader", "nounits"}:
            raise NoAnswerError(INVALID_QUERY, stderr="nvidia-smi: a query needs --format=csv[,noheader][,nounits]\n")
        return "noheader" not in words, "nounits" not in words


def described() -> Machine:
    """The machine's GPUs, from the environment of this process or of one of its ancestors.

    Raises:
        NoAnswerError: None of these processes belongs to a rank on the virtual GPU.
    """
    text, process = os.environ.get(VARIABLE), os.getppid()
    with suppress(OSError, ValueError):
        while text is None and process > 1:
            with open(f"/proc/{process}/environ", "rb") as file:
                variables = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
            text = variables[VARIABLE.encode()].decode() if VARIABLE.encode() in variables else None
            with open(f"/proc/{process}/stat") as file:
                process = int(file.read().rpartition(") ")[2].split()[1])  # proc(5): state, parent
    try:
        return Machine(**json.loads(text or ""))
    except (TypeError, ValueError):
        message = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
        raise NoAnswerError(
            NO_DRIVER, message, f"nvidia-smi: {VARIABLE} does not describe fakedist's virtual GPU\n"
        ) from None


def chosen(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """The GPUs that ``--id`` selects, in the machine's order.

    Raises:
        NoAnswerError: A GPU does not exist.
    """
    if wanted is None:
        return gpus
    found = set()
    for entry in (each.strip().lower() for each in wanted.split(",")):
        matching = [gpu.index for gpu in gpus if entry in gpu.identifiers()]
        if not matching:
            raise NoAnswerError(NOT_FOUND, "No devices were found\n")
        found.update(matching)
    return [gpu for gpu in gpus if gpu.index in found]


def csv(rows: list[list[str]]) -> str:
    """Rows as CSV, with the real tool's separators."""
    return "".join(", ".join(row) + "\n" for row in rows)


def gpu_query(asked: Asked, gpus: list[Gpu]) -> tuple[str, bool]:
    """Answer ``--query-gpu``. Returns the output, and whether it contains constants of an idle GPU.

    Raises:
        NoAnswerError: A field does not exist.
    """
    fields = [each.strip() for each in asked.values["--query-gpu"].split(",")]
    names = [ALIASES.get(each, each) for each in fields]
    for each, name in zip(fields, names, strict=True):
        if not known_field(name, gpus[0]):
            raise NoAnswerError(INVALID_QUERY, f'Field "{each}" is not a valid field to query.\n\n')
    has_header, has_units = asked.format()
    values = [[gpu.value(name) for name in names] for gpu in gpus]
    units = [unit for _, unit in values[0]]
    header = [f"{name} [{unit}]" if unit else name for name, unit in zip(names, units, strict=True)]
    bare = ("",) if has_units else ("", *units)
    rows = [
        [str(value) if unit in bare or value == NOT_AVAILABLE else f"{value} {unit}" for value, unit in row]
        for row in values
    ]
    return csv([*([header] if has_header else []), *rows]), any(name not in gpus[0].known() for name in names)


def apps_query(asked: Asked) -> str:
    """Answer ``--query-compute-apps``: no process runs.

    Raises:
        NoAnswerError: A field does not exist.
    """
    fields = [each.strip() for each in asked.values["--query-compute-apps"].split(",")]
    for each in fields:
        if each not in _APPS:
            raise NoAnswerError(INVALID_QUERY, f'Field "{each}" is not a valid field to query.\n\n')
    has_header, _ = asked.format()
    return csv([[_APPS[each] for each in fields]] if has_header else [])


def answer(asked: Asked, machine: Machine) -> tuple[str, bool]:
    """The output of a call, and whether it contains constants of an idle GPU.

    Raises:
        NoAnswerError: The call has no answer.
    """
    if "--help" in asked.flags:
        return _HELP, False
    every = [Gpu(machine, index) for index in range(machine.devices)]
    gpus = chosen(every, asked.values.get("--id"))
    if "--help-query-gpu" in asked.flags:
        return "".join(f'"{name}"\n' for name in sorted({*every[0].known(), *every[0].constants(), *ALIASES})), False
    if "--version" in asked.flags:
        version = machine.driver
        parts = (
            ("NVIDIA-SMI version", version),
            ("NVML version", version.rpartition(".")[0]),
            ("DRIVER version", version),
            ("CUDA Version", machine.cuda),
        )
        return "".join(f"{title:<20}: {text}\n" for title, text in parts), False
    if "--query-gpu" in asked.values:
        return gpu_query(asked, gpus)
    if "--query-compute-apps" in asked.values:
        return apps_query(asked), True
    if "--list-gpus" in asked.flags:
        return "".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n" for gpu in gpus), False
    return (long_form(asked.values.get("--display", ""), gpus) if "--query" in asked.flags else table(gpus)), True


def main(arguments: list[str]) -> int:
    """Answer one call; returns the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `nvidia-smi | head -1` ends quietly
    try:
        machine = described()
        try:
            text, is_constant = answer(Asked.parse(arguments), machine)
        except NoAnswerError as error:
            if error.code == INVALID_QUERY:
                write_call(machine.calls, REFUSED, arguments)
            raise
    except NoAnswerError as failed:
        sys.stdout.write(failed.stdout)
        sys.stderr.write(failed.stderr)
        return failed.code
    if is_constant:
        write_call(machine.calls, CONSTANT, arguments)
    sys.stdout.write(text)
    return 0
