"""The program ``nvidia-smi``: answers one call.

Values that do not follow from the GPU's model are constants of an idle GPU, as NVML's sensors are.

An environment variable describes the GPUs; if the script cleared it, the program reads it from a parent process. Calls
that it refuses, or answers with those constants, go to a file in the run directory; the report's notes count them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field

from fakedist.rundir.smi_calls import CONSTANT, REFUSED, write_call

IDLE_MILLIWATTS, LIMIT_MILLIWATTS, IDLE_CELSIUS, IDLE_MHZ = 70_000, 700_000, 35, 345  # driver/nvml_sensors.c
REASON_IDLE = 1
NOT_AVAILABLE = "[N/A]"
INVALID_QUERY, NOT_FOUND, NO_DRIVER = 2, 6, 9  # exit codes: RETURN VALUE in nvidia-smi(1)

ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "gpu_serial": "serial",
    "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics",
    "clocks.mem": "clocks.current.memory",
    "clocks.video": "clocks.current.video",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "clocks.applications.gr": "clocks.applications.graphics",
    "clocks.applications.mem": "clocks.applications.memory",
}
#: Fields of the real tool that not every GPU has, or that the models do not define.
_ABSENT = re.compile(
    r"fan\.speed|serial|vbios_version|board_id|gpu_part_number|temperature\.(memory|gpu\.tlimit)|addressing_mode|"
    r"inforom\.(img|image|oem|ecc|pwr|power)|gom\.(current|pending)|pci\.(device_id|sub_device_id)|"
    r"utilization\.(jpeg|ofa)|encoder\.stats\.(sessionCount|averageFps|averageLatency)|accounting\.(mode|buffer_size)|"
    r"retired_pages\.(single_bit_ecc\.count|sbe|double_bit\.count|dbe|pending)|remapped_rows\.(correctable|"
    r"uncorrectable|pending|failure)|driver_model\.(current|pending)|gsp\.mode\.(current|default)|c2c\.mode|"
    r"fabric\.(state|status)|module\.power\.(draw|limit|draw\.average|draw\.instant)|protected_memory\.(total|used|free)"
)
_ABSENT_UNITS = {"fan.speed": "%", "utilization.": "%", "module.power.": "W", "protected_memory.": "MiB"}
_ECC_ERRORS = re.compile(
    r"ecc\.errors\.(un)?corrected\.(volatile|aggregate)\."
    r"(device_memory|dram|register_file|l1_cache|l2_cache|texture_memory|cbu|sram|total)"
)
_REASONS = re.compile(
    r"clocks_(event|throttle)_reasons\.(gpu_idle|applications_clocks_setting|sw_power_cap|hw_slowdown|"
    r"hw_thermal_slowdown|hw_power_brake_slowdown|sw_thermal_slowdown|sync_boost)"
)


class NoAnswerError(Exception):
    """The call ends without an answer: the program writes to stdout and stderr, and exits with ``code``."""

    def __init__(self, code: int, stdout: str = "", stderr: str = "") -> None:
        super().__init__(stdout or stderr)
        self.code, self.stdout, self.stderr = code, stdout, stderr


@dataclass(frozen=True)
class Machine:
    """The machine's GPUs, passed to the program as JSON in an environment variable; ``memory_bytes`` is each one's.

    ``devices`` includes those that CUDA_VISIBLE_DEVICES hides. ``calls`` is the file to which the program appends.
    """

    name: str
    memory_bytes: int
    devices: int
    compute_capability: str
    sm_mhz: int
    memory_mhz: int
    cuda: str
    calls: str

    def text(self) -> str:
        """The machine as JSON."""
        return json.dumps(vars(self))

    @property
    def driver(self) -> str:
        """Version of a driver for that CUDA, as nvmlSystemGetDriverVersion returns it."""
        return "580.65.06" if int(self.cuda.split(".")[0]) >= 13 else "570.124.06"


@dataclass(frozen=True)
class Gpu:
    """One GPU of the machine, by its number."""

    machine: Machine
    index: int

    @property
    def name(self) -> str:
        """CUDA's name for it."""
        return self.machine.name

    @property
    def memory_mib(self) -> int:
        """Total memory."""
        return self.machine.memory_bytes >> 20

    @property
    def uuid(self) -> str:
        """The driver's UUID: device_uuid in driver/devices.c."""
        text = (b"fakedist virtual"[:15] + bytes([ord("0") + self.index & 0xFF])).hex()
        return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

    @property
    def bus_id(self) -> str:
        """NVML's PCI bus ID."""
        return f"00000000:{self.index + 1:02X}:00.0"

    def identifiers(self) -> tuple[str, ...]:
        """The values of ``--id`` that select it, in lower case."""
        bus_id = self.bus_id.lower()
        return str(self.index), self.uuid.lower(), bus_id, bus_id[4:]

    def known(self) -> dict[str, tuple[object, str]]:
        """Values and units that follow from the GPU's model, by field."""
        return {
            "timestamp": (f"{time.strftime('%Y/%m/%d %H:%M:%S')}.{time.time_ns() // 1_000_000 % 1000:03d}", ""),
            "driver_version": (self.machine.driver, ""),
            "count": (self.machine.devices, ""),
            "name": (self.name, ""),
            "uuid": (self.uuid, ""),
            "index": (self.index, ""),
            "pci.bus_id": (self.bus_id, ""),
            "pci.domain": ("0x0000", ""),
            "pci.bus": (f"0x{self.index + 1:02X}", ""),
            "pci.device": ("0x00", ""),
            "compute_cap": (self.machine.compute_capability, ""),
            "memory.total": (self.memory_mib, "MiB"),
            "clocks.max.sm": (self.machine.sm_mhz, "MHz"),
            "clocks.max.graphics": (self.machine.sm_mhz, "MHz"),
            "clocks.max.memory": (self.machine.memory_mhz, "MHz"),
            "persistence_mode": ("Enabled", ""),
            "compute_mode": ("Default", ""),
            "display_active": ("Disabled", ""),
            "display_mode": ("Disabled", ""),
            "mig.mode.current": ("Disabled", ""),
            "mig.mode.pending": ("Disabled", ""),
            "ecc.mode.current": ("Enabled", ""),
            "ecc.mode.pending": ("Enabled", ""),
        }

    def constants(self) -> dict[str, tuple[object, str]]:
        """Values and units of an idle GPU, by field."""
        watts, limit = (f"{milliwatts / 1000:.2f}" for milliwatts in (IDLE_MILLIWATTS, LIMIT_MILLIWATTS))
        links = {f"pcie.link.gen.{which}": (5, "") for which in ("current", "max", "gpucurrent", "gpumax", "hostmax")}
        return {
            "memory.reserved": (0, "MiB"),
            "memory.used": (0, "MiB"),
            "memory.free": (self.memory_mib, "MiB"),
            **{f"utilization.{which}": (0, "%") for which in ("gpu", "memory", "encoder", "decoder")},
            "temperature.gpu": (IDLE_CELSIUS, ""),
            "pstate": ("P0", ""),
            **{f"power.draw{which}": (watts, "W") for which in ("", ".average", ".instant")},
            **{f"{which}power.limit": (limit, "W") for which in ("", "enforced.")},
            **{f"power.{which}_limit": (limit, "W") for which in ("default", "max")},
            "power.min_limit": (watts, "W"),
            "power.management": ("Enabled", ""),
            **{f"clocks.current.{which}": (IDLE_MHZ, "MHz") for which in ("sm", "graphics", "video")},
            "clocks.current.memory": (self.machine.memory_mhz, "MHz"),
            "clocks.applications.graphics": (self.machine.sm_mhz, "MHz"),
            "clocks.applications.memory": (self.machine.memory_mhz, "MHz"),
            **links,
            **{f"pcie.link.width.{which}": (16, "") for which in ("current", "max")},
            **{f"clocks_{which}_reasons.active": (f"0x{REASON_IDLE:016x}", "") for which in ("event", "throttle")},
        }

    def value(self, name: str) -> tuple[object, str]:
        """Value and unit of a field that :func:`known_field` knows."""
        if (found := {**self.known(), **self.constants()}.get(name)) is not None:
            return found
        if _ECC_ERRORS.fullmatch(name):
            return 0, ""
        if _REASONS.fullmatch(name):
            return ("Active" if name.endswith(".gpu_idle") else "Not Active"), ""
        unit = next((unit for family, unit in _ABSENT_UNITS.items() if name.startswith(family)), "")
        return NOT_AVAILABLE, unit


def known_field(name: str, gpu: Gpu) -> bool:
    """Return whether the real tool has the field."""
    families = (_ABSENT, _ECC_ERRORS, _REASONS)
    return name in gpu.known() or name in gpu.constants() or any(family.fullmatch(name) for family in families)


def table(gpus: list[Gpu]) -> str:
    """The output without arguments."""
    machine = gpus[0].machine
    version = machine.driver
    line = f"+{'-' * 41}+{'-' * 24}+{'-' * 22}+"
    whole = f"+{'-' * 89}+"
    first = f"NVIDIA-SMI {version:<22} Driver Version: {version:<14} CUDA Version: {machine.cuda}"
    lines = [time.strftime("%a %b %e %H:%M:%S %Y"), whole, f"| {first:<87} |", line]
    lines += [
        f"| {'GPU  Name':<25}{'Persistence-M':>14} | {'Bus-Id':<15} {'Disp.A':>6} | {'Volatile Uncorr. ECC':<20} |",
        f"| {'Fan  Temp   Perf':<25}{'Pwr:Usage/Cap':>14} | {'Memory-Usage':>22} | {'GPU-Util  Compute M.':<20} |",
        f"| {'':<39} | {'':<22} | {'MIG M.':>20} |",
        f"|{'=' * 41}+{'=' * 24}+{'=' * 22}|",
    ]
    power = f"{IDLE_MILLIWATTS // 1000}W / {LIMIT_MILLIWATTS // 1000:>4}W"
    for gpu in gpus:
        memory = f"0MiB / {gpu.memory_mib:>6}MiB"
        lines += [
            f"| {gpu.index:>3}  {gpu.name:<28.28}   {'On':<4}| {gpu.bus_id:>18} {'Off':<3} | {0:>20} |",
            f"| N/A {IDLE_CELSIUS:>4}C    P0  {power:>22} | {memory:>22} | {'0%':>7} {'Default':>12} |",
            f"| {'':<39} | {'':<22} | {'Disabled':>20} |",
            line,
        ]
    titles = f"{' GPU   GI   CI              PID   Type   Process name':<70}{'GPU Memory':>17}"
    more = f"{'       ID   ID':<77}{'Usage':<10}"
    lines += ["", whole, f"| {'Processes:':<87} |", f"| {titles} |", f"| {more} |", f"|{'=' * 89}|"]
    return "\n".join([*lines, f"| {' No running processes found':<87} |", whole, ""])


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
_VALUED = ("--query-gpu", "--query-compute-apps", "--format", "--id")


@dataclass
class Asked:
    """A command line: options with a value, and whether it has ``-L``."""

    values: dict[str, str] = field(default_factory=dict)
    lists: bool = False

    @classmethod
    def parse(cls, arguments: list[str]) -> Asked:
        """Parse arguments into options by their long names. NoAnswerError if one is unknown or lacks its value."""
        asked, rest = cls(), list(arguments)
        while rest:
            option, equals, value = rest.pop(0).partition("=")
            name = {"-i": "--id", "-L": "--list-gpus"}.get(option, option)
            if name in _VALUED:
                if not equals and not rest:
                    raise NoAnswerError(INVALID_QUERY, stderr=f"nvidia-smi: {option} needs a value\n")
                asked.values[name] = value if equals else rest.pop(0)
            elif name == "--list-gpus" and not equals:
                asked.lists = True
            else:
                supported = "-L, -i, --query-gpu, --query-compute-apps and --format are"
                said = f"nvidia-smi: {option} is not supported on fakedist's virtual GPU; {supported}\n"
                raise NoAnswerError(INVALID_QUERY, stderr=said)
        return asked

    def format(self) -> tuple[bool, bool]:
        """Return whether the output has a header, and whether it has units. NoAnswerError unless the format is CSV."""
        words = {word.strip() for word in self.values.get("--format", "").split(",")}
        if "csv" not in words or words - {"csv", "noheader", "nounits"}:
            raise NoAnswerError(INVALID_QUERY, stderr="nvidia-smi: a query needs --format=csv[,noheader][,nounits]\n")
        return "noheader" not in words, "nounits" not in words


def described() -> Machine:
    """The machine's GPUs, from the environment of this process or an ancestor. NoAnswerError if none has it."""
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
    """The GPUs that ``--id`` selects, in the machine's order. NoAnswerError if one does not exist."""
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
    """Answer ``--query-gpu``: the output, and whether an idle GPU's constants are in it. NoAnswerError for unknown
    fields.
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
    """Answer ``--query-compute-apps``: no process runs. NoAnswerError for an unknown field."""
    fields = [each.strip() for each in asked.values["--query-compute-apps"].split(",")]
    for each in fields:
        if each not in _APPS:
            raise NoAnswerError(INVALID_QUERY, f'Field "{each}" is not a valid field to query.\n\n')
    has_header, _ = asked.format()
    return csv([[_APPS[each] for each in fields]] if has_header else [])


def answer(asked: Asked, machine: Machine) -> tuple[str, bool]:
    """The output of a call, and whether it contains constants of an idle GPU. NoAnswerError without an answer."""
    gpus = chosen([Gpu(machine, index) for index in range(machine.devices)], asked.values.get("--id"))
    if "--query-gpu" in asked.values:
        return gpu_query(asked, gpus)
    if "--query-compute-apps" in asked.values:
        return apps_query(asked), True
    if asked.lists:
        return "".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n" for gpu in gpus), False
    return table(gpus), True


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
