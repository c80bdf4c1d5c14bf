"""The virtual GPU in this process: load the driver before torch, configure its GPU model, read its counters."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fakedist.errors import RecordingError
from fakedist.gpu.driver.build import ensure_driver, find_cuda, further_libraries
from fakedist.gpu.models.spec import queue_depth
from fakedist.rundir import notes
from fakedist.rundir.notes import Note
from fakedist.rundir.rows import DeviceUseRow

if TYPE_CHECKING:
    from fakedist.gpu.models.spec import GpuSpec

#: Where the processes of a rank find what they hold of each device.
LEDGER_VARIABLE = "FAKEDIST_LEDGER"
MAX_DEVICES = 128  # MAX_DEVICES in driver/virtual_gpu.h
_NUM_LANES, _MOST_MOMENTS = 16, 512  # NUM_LANES and MOST_MOMENTS in driver/ledger.h
_loaded: list[
    ctypes.CDLL
] = []  # a fork server loads the driver, and each rank that forks from it configures its own GPU


class _GpuModel(ctypes.Structure):
    """``struct gpu_model`` of driver/virtual_gpu.h, field by field."""

    _fields_ = [
        ("name", ctypes.c_char * 64),
        *((name, ctypes.c_uint64) for name in ("memory_bytes", "others_bytes")),
        *((name, ctypes.c_int32) for name in ("devices", "major", "minor", "sms")),
        *((name, ctypes.c_int32) for name in ("clock_khz", "memory_clock_khz", "memory_bus_bits", "l2_bytes")),
        *((name, ctypes.c_int32) for name in ("shared_per_block", "shared_per_block_optin", "shared_per_sm")),
        *((name, ctypes.c_int32) for name in ("registers_per_block", "registers_per_sm")),
        *((name, ctypes.c_int32) for name in ("threads_per_sm", "blocks_per_sm", "runtime_version", "multicasts")),
    ]


class _GpuCounters(ctypes.Structure):
    """``struct gpu_counters`` of driver/virtual_gpu.h."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("launches", "copies", "copies_dropped", "bytes_dropped", "mallocs", "frees"),
            *("reads_made_up", "bytes_made_up"),
        )
    ]


_LONGEST_NAME = 40
#: ``enum owner`` of driver/capacity.h after the allocator: memory that others can map, NVSHMEM's, managed, all else.
_OWNERS = ("user buffers", "NVSHMEM heap", "managed memory", "memory pools", "extensions")
#: ``peer_copy_function`` of driver/submit.c.
_TELL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
#: ``decide_function`` of driver/capacity.c.
_DECIDE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


class InUse(NamedTuple):
    """Bytes of a device, without contexts: the most that all processes used without an inference engine's KV cache, and
    with one; and what is used now behind the caching allocator's segments, outside of it, and by other processes.
    """

    most_asleep: int
    most_awake: int
    backed: int
    outside: int
    others: int


class VirtualGpu:
    """The loaded driver; ``variables`` are those that torch and Triton must see, ``wishes`` only if not already set."""

    def __init__(self, library: ctypes.CDLL, variables: Mapping[str, str], wishes: Mapping[str, str]) -> None:
        self._library = library
        self._variables, self._wishes = variables, wishes
        library.fakedist_refused.restype = ctypes.c_char_p
        library.fakedist_constant.restype = ctypes.c_char_p
        library.fakedist_work_area.restype = ctypes.c_char_p
        library.fakedist_lane.restype = ctypes.c_char_p
        for counted in ("traced", "managed_bytes", "outside", "outside_now", "backed", "num_changes", "lacked_bytes"):
            getattr(library, f"fakedist_{counted}").restype = ctypes.c_uint64
        library.fakedist_name_crashes()
        self._decide: object = None  # what the driver calls must live
        self._told: object = None

    def configure(self, spec: GpuSpec, devices: int, memory_bytes: int, others_bytes: int = 0) -> None:
        """Act as ``devices`` GPUs of one model, each with ``memory_bytes``, of which others hold ``others_bytes``."""
        major, minor = spec.compute_capability
        model = _GpuModel(
            name=spec.product.encode()[:63],
            memory_bytes=memory_bytes,
            others_bytes=others_bytes,
            devices=devices,
            major=major,
            minor=minor,
            runtime_version=_runtime_version(),
            multicasts=int(spec.can_multicast),
            **spec.driver_fields(),
        )
        self._library.fakedist_poison(os.environ.get("FAKEDIST_POISON") == "1")
        self._library.fakedist_configure(ctypes.byref(model))

    def share(self, context_bytes: int = 0) -> None:
        """Share the devices' memory with the processes started from here on that call this too, until they end.

        Each holds ``context_bytes`` of a device as soon as it holds any memory of it; 0: not known.
        """
        if path := os.environ.get(LEDGER_VARIABLE):
            file, is_first = os.open(path, os.O_RDWR | os.O_CLOEXEC), False
        else:
            file, is_first = os.memfd_create("fakedist-ledger", os.MFD_CLOEXEC), True
            os.environ[LEDGER_VARIABLE] = f"/proc/{os.getpid()}/fd/{file}"
        if not self._library.fakedist_share(file, ctypes.c_uint64(context_bytes), is_first):
            raise RecordingError("the ledger of the virtual GPU's memory cannot be mapped", "start the rank anew")

    def go_beyond(self, decide: Callable[[int, int, int, int], bool] | None) -> None:
        """Ask ``decide(device, bytes, limit_bytes, thread)`` whether to grant a request beyond a device's memory.

        It is called in a thread of its own, while the one that asks waits with the caching allocator's lock: it must
        neither allocate nor free device memory. None refuses such requests.
        """
        self._decide = None if decide is None else _DECIDE(decide)
        self._library.fakedist_go_beyond(self._decide)

    def tell_peer_copies(self, told: Callable[[int, int, int, int], int]) -> None:
        """Call ``told(to, from, bytes, ends)`` where a copy to or from memory of another GPU begins, and where it ends.

        The first two are addresses. It returns 1 if the copy is part of a call that a kernel makes after it.
        """
        self._told = _TELL(told)
        self._library.fakedist_tell_peer_copies(self._told)

    def limit(self, device: int, bytes_: int) -> None:
        """Let a device's memory end at so many bytes; 0 for the GPU model's own."""
        self._library.fakedist_limit(device, ctypes.c_uint64(bytes_))

    def lag(self, launch_queues: str) -> None:
        """Lag behind the host from here on, as far as launch queues allow; ``launch_queues`` as for ``queue_depth``."""
        self._library.fakedist_lag(queue_depth(launch_queues))

    def as_one(self, more: int) -> None:
        """From now on (1), or no longer (-1), what this thread launches takes one place in a launch queue."""
        self._library.fakedist_as_one(more)

    def asked_once(self, more: int) -> None:
        """From now on (1), or no longer (-1), the allocator does not repeat a refused request."""
        self._library.fakedist_asked_once(more)

    @property
    def lacked_bytes(self) -> int:
        """The bytes that this machine could not give, whatever the GPU has left: the first of them. 0: it could."""
        return int(self._library.fakedist_lacked_bytes())

    @property
    def is_beyond(self) -> bool:
        """Whether a request beyond a device's memory was granted."""
        return bool(self._library.fakedist_is_beyond())

    def keep_plans(self, directory: Path) -> None:
        """Keep in a directory cuDNN's answers on its execution plans. It compiles a kernel for each."""
        with suppress(OSError):  # then cuDNN is asked in each process
            directory.mkdir(parents=True, exist_ok=True)
            self._library.fakedist_keep_plans(os.fsencode(directory))

    def set_environment(self) -> None:
        """Set the variables. It runs at torch's import too, because the script may have cleared them since."""
        os.environ.update(self._variables)
        for name, value in self._wishes.items():
            os.environ.setdefault(name, value)

    def visible(self) -> list[int]:
        """The machine's number of each device that the process sees; empty until the process asks CUDA for a device."""
        numbers: list[int] = []
        while (number := self._library.fakedist_installed(len(numbers))) >= 0:
            numbers.append(number)
        return numbers

    def counters(self) -> dict[str, int]:
        """Counts so far. ``copies_dropped``: large tensors hold no data. ``reads_made_up``: of threads not Python's."""
        counters = _GpuCounters()
        self._library.fakedist_counters(ctypes.byref(counters))
        return {field[0]: int(getattr(counters, field[0])) for field in _GpuCounters._fields_}

    def take(self, owner: str, num_bytes: int) -> int:
        """Take memory of the current device for one of the owners. Returns its address, or 0 if it does not fit."""
        address = ctypes.c_void_p()
        self._library.fakedist_take(ctypes.byref(address), ctypes.c_uint64(num_bytes), _OWNERS.index(owner) + 1)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free what :meth:`take` returned."""
        self._library.fakedist_give_back(ctypes.c_void_p(address))

    def outside(self, device: int) -> dict[str, int]:
        """The most bytes that each owner took outside the caching allocator, by its name."""
        most = {name: int(self._library.fakedist_outside(device, i)) for i, name in enumerate(_OWNERS, start=1)}
        return {name: num_bytes for name, num_bytes in most.items() if num_bytes}

    def outside_now(self, device: int) -> dict[str, int]:
        """Bytes that each owner holds outside the caching allocator, by its name."""
        now = {name: int(self._library.fakedist_outside_now(device, i)) for i, name in enumerate(_OWNERS, start=1)}
        return {name: num_bytes for name, num_bytes in now.items() if num_bytes}

    def is_backed(self, address: int) -> bool:
        """Whether there is memory behind an address of the device."""
        access = ctypes.c_ulonglong()
        self._library.cuMemGetAccess(ctypes.byref(access), None, ctypes.c_void_p(address))
        return bool(access.value)

    def outside_peak(self, device: int) -> int:
        """The most bytes that were taken outside the caching allocator at one time."""
        return int(self._library.fakedist_outside(device, 0))

    def backed_peak(self, device: int) -> int:
        """The most bytes that were behind the caching allocator's segments. Those that sleep have none."""
        return int(self._library.fakedist_backed(device))

    def in_use(self, device: int, *, restarts: bool = True) -> InUse:
        """Memory in use of a shared device. Its most begin anew if it ``restarts`` in the process that shares first."""
        used = (ctypes.c_uint64 * len(InUse._fields))()
        self._library.fakedist_in_use(device, restarts, used)
        return InUse(*used)

    def engine(self, device: int, *, is_awake: bool) -> None:
        """Say that an inference engine of this process has its KV cache from here on, or no longer."""
        self._library.fakedist_engine(device, is_awake)

    def most_of_engine(self, device: int) -> tuple[int, int]:
        """The most bytes in use of a shared device, by all processes, without an engine's KV cache and with one, since
        one first had it; (0, 0) if none had.
        """
        most = (ctypes.c_uint64 * 2)()
        self._library.fakedist_most_of_engine(device, most)
        return most[0], most[1]

    def called(self, name: str) -> None:
        """Say what this process is called where it is another process than the one that shares first."""
        self._library.fakedist_called(name.encode(errors="replace")[:_LONGEST_NAME])

    def num_changes(self, device: int) -> int:
        """Changes of what all processes use of a device, so far."""
        return int(self._library.fakedist_num_changes(device))

    def timeline(self, device: int) -> tuple[list[str], list[DeviceUseRow]]:
        """Memory of a device that all processes used, without their contexts, for the process that shares first.

        Returns:
            Names of other processes that held memory, where those of one name that ran one after another are one; and
            at most 513 rows. In a long run a row has the bytes after that of its changes with the most in use.
        """
        moments = (ctypes.c_uint64 * (1 + _NUM_LANES) * (_MOST_MOMENTS + 1))()
        count = self._library.fakedist_timeline(device, moments)
        rows = [(moment[0], moment[1:]) for moment in moments[:count]]
        lanes = [(lane, self._library.fakedist_lane(lane)) for lane in range(_NUM_LANES)]
        named = {
            lane: name.decode(errors="replace") for lane, name in lanes if name and any(held[lane] for _, held in rows)
        }
        return list(named.values()), [
            DeviceUseRow(change, held[0], held[1], tuple(held[lane] for lane in named)) for change, held in rows
        ]

    def traced(self) -> int:
        """Launches reported to a profiler through CUPTI, so far."""
        return int(self._library.fakedist_traced())

    def refused(self) -> list[tuple[str, int]]:
        """CUDA functions that were called but that the driver does not implement, with their number of calls."""
        return self._counted(self._library.fakedist_refused)

    def notes(self) -> list[Note]:
        """Notes for the report: constant NVML sensors, estimated work areas, managed memory, reads of other threads."""
        readings = dict(self._counted(self._library.fakedist_constant))
        all_notes = [notes.sensors_constant(readings)] if readings else []
        if areas := dict(self._counted(self._library.fakedist_work_area)):
            all_notes.append(notes.work_areas_estimated(areas))
        if managed := int(self._library.fakedist_managed_bytes()):
            all_notes.append(notes.memory_managed(managed))
        counters = self.counters()
        if reads := counters["reads_made_up"]:
            all_notes.append(notes.read_in_other_threads(reads, counters["bytes_made_up"]))
        return all_notes

    def _counted(self, function: Callable[..., bytes | None]) -> list[tuple[str, int]]:
        calls = ctypes.c_uint64()
        counts: list[tuple[str, int]] = []
        while (name := function(len(counts), ctypes.byref(calls))) is not None:
            counts.append((name.decode(), calls.value))
        return counts


@contextmanager
def virtual_gpu(
    spec: GpuSpec, devices: int = 1, memory_bytes: int | None = None, others_bytes: int = 0
) -> Iterator[VirtualGpu]:
    """Give this process 1 to 128 virtual GPUs. Enter it before torch is imported.

    RTLD_GLOBAL puts the driver's functions before those of CUDA libraries that torch loads later; its soname answers
    every ``dlopen("libcuda.so.1")``, NVML and the CUDA runtime alike. Spawned processes get only the path of the
    libcuda.so.1 that Triton links its launchers with.

    Raises:
        RecordingError: torch is already imported, so bound to the real libraries, or ``devices`` is out of range.
        SetupError: The driver cannot be built.
    """
    if "torch" in sys.modules and not _loaded:
        raise RecordingError("torch was imported before the virtual GPU was loaded", "this is a bug in fakedist")
    if not 1 <= devices <= MAX_DEVICES:
        raise RecordingError(f"the virtual GPU has 1 to {MAX_DEVICES} devices, not {devices}", "change --gpus-per-node")
    driver = ensure_driver()
    library = ctypes.CDLL(os.fspath(driver), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    _loaded.append(library)
    gpu = VirtualGpu(library, _variables(driver), _wishes(driver))
    for name in further_libraries(find_cuda()):
        ctypes.CDLL(os.fspath(driver.parent / name), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    gpu.keep_plans(driver.parent.parent / "compiled" / "cudnn")
    gpu.configure(spec, devices, memory_bytes or spec.memory_bytes, others_bytes)
    before = {name: os.environ.get(name) for name in (*_variables(driver), *_wishes(driver))}
    gpu.set_environment()
    try:
        # The driver stays loaded and on: tensors that outlive this block are freed through it.
        yield gpu
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _runtime_version() -> int:
    """CUDART_VERSION of the installed torch's CUDA, e.g. 13020 for 13.2."""
    major, minor = find_cuda().cuda_version.split(".")[:2]
    return int(major) * 1000 + int(minor) * 10


def _variables(driver: Path) -> dict[str, str]:
    return {
        "TRITON_LIBCUDA_PATH": os.fspath(driver.parent),  # Triton links launchers with this driver
        # Output of NVRTC's stand-in, and tuning by times of kernels that did not run, must not be cached where a
        # process with a real GPU would find it.
        "USE_PYTORCH_KERNEL_CACHE": "0",
    }


def _wishes(driver: Path) -> dict[str, str]:
    compiled = driver.parent.parent / "compiled"
    return {
        # Graphs that earlier versions left in "inductor" may have constants from memory that nothing computed.
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(compiled / "graphs"),
        "TRITON_CACHE_DIR": os.fspath(compiled / "triton"),
        # Inductor's compile worker processes look for a GPU (torch 2.11) and would not find one.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
