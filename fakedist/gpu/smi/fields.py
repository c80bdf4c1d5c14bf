"""The fields of ``nvidia-smi`` on the virtual GPU, and how a call ends that is not answered.

Values that do not follow from the GPU's model are constants of an idle GPU, as NVML's sensors are.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

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
    """The call ends without an answer.

    Args:
        code: Exit code of the program.
        stdout: What it writes to stdout.
        stderr: What it writes to stderr.
    """

    def __init__(self, code: int, stdout: str = "", stderr: str = "") -> None:
        super().__init__(stdout or stderr)
        self.code, self.stdout, self.stderr = code, stdout, stderr


def refused(what: str) -> NoAnswerError:
    """The end of a call that the real tool answers and this one does not."""
    return NoAnswerError(INVALID_QUERY, stderr=f"nvidia-smi: {what} is not supported on fakedist's virtual GPU\n")


@dataclass(frozen=True)
class Machine:
    """The machine's GPUs, passed to the program as JSON in an environment variable.

    Attributes:
        name: CUDA's name for each GPU.
        memory_bytes: Memory of each.
        devices: Number of GPUs, including those that CUDA_VISIBLE_DEVICES hides.
        compute_capability: For example "9.0".
        sm_mhz: Highest clock of the SMs.
        memory_mhz: Clock of the memory.
        cuda: The CUDA version of torch, for example "13.2".
        calls: The file to which the program appends its calls.
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
    """Whether the real tool has the field."""
    families = (_ABSENT, _ECC_ERRORS, _REASONS)
    return name in gpu.known() or name in gpu.constants() or any(family.fullmatch(name) for family in families)
