"""The GPU models that fakedist knows by name, and finding the one that ``--gpu`` means.

A file needs every key, unless it names a known model that it is like::

    like = "h100-80g"
    memory = "95.5GiB"
    memory_gb_s = 2400
    watts = 500

Sources. SMs, clocks, caches: NVIDIA's architecture whitepapers (A100, H100, Ada, Blackwell). Bandwidth and dense peak
FLOP/s: NVIDIA's data sheets, without sparsity. Watts: as each file says. ``memory`` is what CUDA reports: less than the
nominal size by ECC and the driver's share, and some MiB apart between drivers. Given to the byte, it and the L2 cache
are from XLA (openxla/xla, xla/backends/gpu/target_config/specs); otherwise from the "total capacity" in torch's
out-of-memory messages, to two decimals of GiB. ``--gpu-memory`` overrides it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from fakedist.bounded import UnreadableError, read_toml
from fakedist.errors import JobError
from fakedist.gpu.models.spec import ARCHITECTURES, GPU_FILE_ENDING, GpuSpec
from fakedist.units import GIB, KIB, TIB, format_bytes, parse_bytes

_Kind = TypeVar("_Kind")


#: A process's CUDA context with PyTorch, as measured and published. No figure was found for any other GPU.
CONTEXT_BYTES = {
    "NVIDIA GeForce RTX 3060": (114 << 20, "sgl-project/sglang#35538"),
    "NVIDIA GeForce RTX 3090": (256 << 20, "invoke-ai/InvokeAI#9413"),
    "NVIDIA H200": (552_402_944, "driver 580.159, docs/accuracy/results.md"),
}


@dataclass(frozen=True)
class _Range:
    """The bounds of a number, which only catch slips of the pen and of the unit."""

    least: float
    most: float
    unit: str
    is_whole: bool = False


_NUMBERS = {
    "sms": _Range(1, 1024, "SMs", is_whole=True),
    "clock_mhz": _Range(100, 10_000, "MHz"),
    "memory_clock_mhz": _Range(100, 100_000, "MHz"),
    "memory_bus_bits": _Range(32, 65_536, "bits", is_whole=True),
    "memory_gb_s": _Range(10, 100_000, "GB/s"),
    "nvlink_gb_s": _Range(0, 100_000, "GB/s"),
    "host_gb_s": _Range(1, 100_000, "GB/s"),
    "watts": _Range(10, 10_000, "W"),
}
_SIZES = {"memory": (GIB, 16 * TIB), "l2": (256 * KIB, 16 * GIB)}
_TEXTS = ("product", "compute_capability")
_PEAK = _Range(0.01, 1_000_000, "TFLOP/s")
_PEAKS = ("fp64", "fp32", "tf32", "bf16", "fp8", "int8")
#: Every GPU that PyTorch supports has units for these.
_NEEDED_PEAKS = ("fp32", "bf16")
#: Without it, the memory's clock follows from bandwidth and bus.
_OPTIONAL = "memory_clock_mhz"
#: Room for a name in CUDA's device properties, less its end.
_LONGEST = 255
_KEYS = ("like", *_TEXTS, *_SIZES, *_NUMBERS, "peak_tflops")


def read_gpu_file(path: Path, known: Mapping[str, GpuSpec] | None = None) -> GpuSpec:
    """The GPU model of a file, which may be like one of ``known``. JobError, with the line, if it is not valid."""
    try:
        values, text = read_toml(path)
    except OSError as error:
        raise JobError(f"the GPU file {path} cannot be read: {error.strerror}", "name a file, or a GPU model") from None
    except UnreadableError as error:  # of what is not TOML the message has line and column
        raise JobError(f"the GPU file {path} is not TOML: {error}", "write lines such as watts = 500") from None
    return _GpuFile(path, text, values).spec(known or {})


class _GpuFile:
    def __init__(self, path: Path, text: str, values: Mapping[str, object]) -> None:
        self._path, self._lines, self._values = path, text.splitlines(), values

    def spec(self, known: Mapping[str, GpuSpec]) -> GpuSpec:
        for key in self._values:
            if key not in _KEYS:
                self._refuse(key, "is not a key of a GPU file", f"the keys are {', '.join(_KEYS)}")
        base = self._base(known)
        texts = {key: self._text(key) for key in _TEXTS if key in self._values}
        numbers = {key: self._number(key, self._values[key], limits) for key, limits in self._given(_NUMBERS)}
        sizes = {key: self._size(key, bounds) for key, bounds in self._given(_SIZES)}
        peaks = self._peaks()
        if base is not None:
            texts = {"product": base.product, "compute_capability": ".".join(map(str, base.compute_capability))} | texts
            sizes = {"memory": base.memory_bytes, "l2": base.l2_bytes} | sizes
            numbers = _numbers_of(base, {"memory_gb_s", "memory_bus_bits"} & set(numbers)) | numbers
            peaks = base.peak_flops | peaks
        for key in _KEYS[1:]:
            if key not in (*texts, *sizes, *numbers, _OPTIONAL, "peak_tflops"):
                self._refuse(key, "is missing", 'add it, or like = "h100-80g" to take what is missing from a known GPU')
        for dtype in _NEEDED_PEAKS:
            if dtype not in peaks:
                self._refuse("peak_tflops", f"lacks {dtype}", f"add {dtype} = ... under [peak_tflops]")
        clock_mhz = numbers["memory_gb_s"] * 8e3 / (2 * numbers["memory_bus_bits"])
        return GpuSpec(
            name=self._path.stem,
            product=texts["product"],
            architecture=ARCHITECTURES[texts["compute_capability"]],
            memory_bytes=sizes["memory"],
            sms=int(numbers["sms"]),
            clock_khz=round(numbers["clock_mhz"] * 1e3),
            memory_clock_khz=round(numbers.get(_OPTIONAL, clock_mhz) * 1e3),
            memory_bus_bits=int(numbers["memory_bus_bits"]),
            l2_bytes=sizes["l2"],
            memory_bandwidth=float(round(numbers["memory_gb_s"] * 1e9)),
            nvlink_bandwidth=float(round(numbers["nvlink_gb_s"] * 1e9)),
            host_bandwidth=float(round(numbers["host_gb_s"] * 1e9)),
            watts=numbers["watts"],
            peak_flops={dtype: peaks[dtype] for dtype in _PEAKS if dtype in peaks},
            like="" if base is None else base.name,
        )

    def _given(self, kinds: Mapping[str, _Kind]) -> list[tuple[str, _Kind]]:
        return [(key, kind) for key, kind in kinds.items() if key in self._values]

    def _base(self, known: Mapping[str, GpuSpec]) -> GpuSpec | None:
        if "like" not in self._values:
            return None
        name = self._values["like"]
        if not isinstance(name, str) or name not in known:
            self._refuse("like", f"is {name!r}, not a known GPU", f"the known GPUs are {', '.join(known)}")
        return known[name]

    def _text(self, key: str) -> str:
        text = self._values[key]
        if not isinstance(text, str) or not text.strip() or not text.isprintable() or len(text.encode()) > _LONGEST:
            self._refuse(key, f"is {text!r}, not a text of 1 to {_LONGEST} characters", f'write {key} = "..."')
        if key == "compute_capability" and text not in ARCHITECTURES:
            self._refuse(key, f"is {text!r}", f"fakedist knows {', '.join(ARCHITECTURES)}")
        return text

    def _number(self, key: str, value: object, limits: _Range) -> float:
        expected = f"{limits.least:,g} to {limits.most:,g} {limits.unit}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._refuse(key, f"is {value!r}, not a number", f"expected {expected}")
        if not limits.least <= value <= limits.most:  # NaN too
            self._refuse(key, f"is {value}", f"expected {expected}")
        if limits.is_whole and value != int(value):
            self._refuse(key, f"is {value}, not a whole number", f"expected {expected}")
        return float(value)

    def _size(self, key: str, bounds: tuple[int, int]) -> int:
        value = self._values[key]
        if not isinstance(value, str):
            self._refuse(key, f"is {value!r}, not a size with a unit", f'write {key} = "80GiB"')
        try:
            size = parse_bytes(value)
        except JobError as error:
            self._refuse(key, f"cannot be read: {error.message}", error.hint)
        if not bounds[0] <= size <= bounds[1]:
            self._refuse(key, f"is {value}", f"expected {format_bytes(bounds[0])} to {format_bytes(bounds[1])}")
        return size

    def _peaks(self) -> dict[str, float]:
        table = self._values.get("peak_tflops", {})
        if not isinstance(table, dict):
            self._refuse("peak_tflops", f"is {table!r}, not a table", "write [peak_tflops] and below it bf16 = 989.4")
        for dtype in table:
            if dtype not in _PEAKS:
                self._refuse(dtype, "is not a type under [peak_tflops]", f"the types are {', '.join(_PEAKS)}")
        return {dtype: float(round(self._number(dtype, value, _PEAK) * 1e12)) for dtype, value in table.items()}

    def _refuse(self, key: str, problem: str, hint: str) -> NoReturn:
        pattern = re.compile(rf"""\s*\[?\s*["']?{re.escape(key)}["']?\s*[\].=]""")
        line = next((number for number, text in enumerate(self._lines, start=1) if pattern.match(text)), 0)
        raise JobError(f"{self._path}{f':{line}' if line else ''}: {key} {problem}", hint)


def _numbers_of(spec: GpuSpec, changed: set[str]) -> dict[str, float]:
    """A model's numbers in a file's units, without the memory's clock if what it follows from has changed."""
    numbers = {
        "sms": float(spec.sms),
        "clock_mhz": spec.clock_khz / 1e3,
        "memory_clock_mhz": spec.memory_clock_khz / 1e3,
        "memory_bus_bits": float(spec.memory_bus_bits),
        "memory_gb_s": spec.memory_bandwidth / 1e9,
        "nvlink_gb_s": spec.nvlink_bandwidth / 1e9,
        "host_gb_s": spec.host_bandwidth / 1e9,
        "watts": spec.watts,
    }
    return {key: value for key, value in numbers.items() if key != _OPTIONAL or not changed}


_MODELS = Path(__file__).parent
#: In the order in which they are listed.
_ORDER = (
    "a100-40g", "a100-80g", "h100-80g", "h200", "b200", "gb200", "b300", "gb300", "rtx-pro-6000", "l40s", "rtx4090",
)  # fmt: skip
GPUS: dict[str, GpuSpec] = {name: read_gpu_file(_MODELS / f"{name}{GPU_FILE_ENDING}") for name in _ORDER}

#: Other names of a model, each for the part that is usual.
_ALIASES = {
    "a100": "a100-80g",
    "a100-sxm": "a100-80g",
    "a100-sxm4": "a100-80g",
    "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g",
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "h100-sxm5": "h100-80g",
    "h100-80gb": "h100-80g",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "b300-sxm": "b300",
    "rtx-4090": "rtx4090",
}


def gpu_of_product(product: str) -> GpuSpec | None:
    """The GPU model that CUDA reports by this name; None if fakedist has none."""
    return next((spec for spec in GPUS.values() if spec.product == product), None)


def find_gpu(name: str, power_watts: float | None = None) -> GpuSpec:
    """The GPU model of a name in :data:`GPUS`, an alias or a ``.toml`` file. JobError if it is not valid."""
    wanted = name.lower()
    spec = GPUS.get(_ALIASES.get(wanted, wanted))
    if spec is None:
        if "," in name:
            raise JobError(
                f"{name!r} names several GPUs, and a rank runs on one",
                f"--gpu {name.partition(',')[0]} here; fakedist time RUN --gpu {name} then prices the run for each",
            )
        if not wanted.endswith(GPU_FILE_ENDING):
            raise JobError(
                f"fakedist does not know the GPU {name!r}",
                f"it knows {', '.join(GPUS)}; for any other, write a GPU file: --gpu my_gpu{GPU_FILE_ENDING}",
            )
        spec = read_gpu_file(Path(name), GPUS)
    return spec if power_watts is None else dataclasses.replace(spec, watts=float(power_watts))
