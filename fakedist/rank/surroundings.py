"""The recorder, the other ranks and the values around the script's torch, installed when torch is imported.

This module imports no more of torch than torch imports itself, and does not initialise CUDA, so whatever the script
sets before it initialises CUDA works as if it were set outside.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from fakedist.gpu.bare_steps import BareGpu, TimedLaunches
from fakedist.gpu.driver_clock import DriverClock
from fakedist.gpu.fast_path.compiled import CompiledFastPath, make_fast_path
from fakedist.gpu.models.catalogue import find_gpu, gpu_of_product
from fakedist.gpu.models.spec import LAUNCH_QUEUES
from fakedist.gpu.native import cache_directory
from fakedist.gpu.tuning import FirstConfigurations, event_times, kept_triton_key
from fakedist.gpu.values.engine import ValueEngine
from fakedist.gpu.values.inventions import Inventions
from fakedist.gpu.values.routing import RunningLayer, spread_over_experts
from fakedist.gpu.virtual import InUse, VirtualGpu
from fakedist.options import Job, profile_command
from fakedist.rank.ending import line_now, uninterrupted
from fakedist.rank.frameworks.adapting import adapted_frameworks, faster_frameworks
from fakedist.rank.reporter import Progress, Reporter
from fakedist.record.cupti import CuptiTracer
from fakedist.record.device_memory import (
    StreamUses,
    allocator_settings,
    check_allocator,
    kept_by_kind,
    nccl_record,
    outside_record,
)
from fakedist.record.dispatch import warnings_at_the_script
from fakedist.record.machine_score import machine_score
from fakedist.record.recorder import Recorder
from fakedist.record.tracer import NsysTracer, OperationTracer, Tracer
from fakedist.router_load import RouterLoad
from fakedist.rundir import notes
from fakedist.rundir.encoding import Record
from fakedist.rundir.launch_records import LaunchesRecord, LaunchKeysRecord
from fakedist.rundir.notes import Note
from fakedist.rundir.outcome import Ending, Outcome
from fakedist.rundir.records import (
    DeviceUseRecord,
    GpuRecord,
    InventedRecord,
    NoteRecord,
    RouterLoadRecord,
    RouterPassesRecord,
    TakenRecord,
    UnansweredRecord,
)
from fakedist.rundir.rows import UnansweredRow
from fakedist.rundir.step_time import Peaks
from fakedist.rundir.tape import find_tapes, script_identity
from fakedist.world.files import saved
from fakedist.world.objects import PeerTapes
from fakedist.world.process_group import around_calls, still_calls
from fakedist.world.reroute import Device, fake_world
from fakedist.world.spawned import OwnRanks
from fakedist.world.tapes import Tapes

_FACTS_EVERY_S = 2.0
#: Blocks kept for streams are noted from this part of the reserved peak on.
_WORTH_A_NOTE = 0.01
#: Packages that are inference engines.
_ENGINES = {"vllm", "sglang"}


class Appends(Protocol):
    """A journal that takes records. ``num_bytes`` have been written."""

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""

    def append(self, record: Record) -> None:
        """Write one record."""


@dataclass(frozen=True)
class Process:
    """The parts of the rank's process that exist before torch.

    ``gpu`` is None on a real GPU. ``own_ranks`` are those that the script itself starts. ``cuda_begins`` is called when
    CUDA is initialised, before anything is allocated. ``first_run`` has the launches with which those of bare steps are
    matched, in a second run of the script.
    """

    job: Job
    journal: Appends
    tape: Appends
    reporter: Reporter
    gpu: VirtualGpu | None
    own_ranks: OwnRanks
    cuda_begins: Callable[[], None]
    first_run: LaunchKeysRecord | None = None


class _UntilRecorded:
    """A journal, or a tape, that takes records until everything is recorded. Later ones are dropped."""

    def __init__(self, journal: Appends) -> None:
        self._journal = journal
        self.is_over = False

    def append(self, record: Record) -> None:
        """Write one record."""
        if not self.is_over:
            self._journal.append(record)


class _Device:
    """The rank's virtual GPU, as :class:`fakedist.record.named_phases.DeviceInUse` says. ``index`` is called for it."""

    def __init__(self, gpu: VirtualGpu, index: Callable[[], int]) -> None:
        self._gpu, self._index = gpu, index

    def in_use(self) -> InUse:
        return self._gpu.in_use(self._index())

    def kept(self) -> tuple[dict[str, int], list[tuple[int, int]]]:
        device = self._index()
        files = [sys.modules[name].__file__ for name in _ENGINES & {*sys.modules}]
        folders = tuple(os.path.dirname(file) + os.sep for file in files if file)
        kinds, asleep = kept_by_kind(device, self._gpu.is_backed, lambda file: file.startswith(folders))
        return kinds | self._gpu.outside_now(device), asleep

    def num_changes(self) -> int:
        return self._gpu.num_changes(self._index())

    def engine(self, *, is_awake: bool) -> None:
        self._gpu.engine(self._index(), is_awake=is_awake)

    def most_of_engine(self) -> tuple[int, int]:
        return self._gpu.most_of_engine(self._index())


class Surroundings:
    """The recorder and the faked world around the script's torch; ``guarded`` runs setup work."""

    def __init__(self, process: Process, guarded: Callable[[Callable[[], None]], None]) -> None:
        self._process = process
        self._job, self._gpu = process.job, process.gpu
        self._journal = _UntilRecorded(process.journal)
        self._bare_gpu: BareGpu | None = None
        self.was_beyond = False  # the GPU's memory, in what is recorded
        self._guarded = guarded
        self._world = self._recording = self._until_bare = ExitStack()
        self._values: ValueEngine | None = None
        self._inventions = Inventions(self._job.seed)
        self._tapes: Tapes | None = None
        self._world_notes: Callable[[], list[Note]] = list
        self._tuning = FirstConfigurations()
        self._facts_at = time.monotonic()
        self._refused = 0
        self._picked = 1  # experts of a token
        self._settings = ""
        self._has_launches = False
        self._lags = self._job.gpu_lag == "full"
        self._load = RouterLoad(self._job.router_load, self._job.seed)
        self._recorder = self._make_recorder()
        self._stream_uses = StreamUses(lambda: self._recorder.position.step)
        if self._values is not None:
            self._values.route_by(self._load, self._job.rank, self._whereabouts)

    def enter(self) -> None:
        """Set up everything that the script will find in torch. A failure leaves nothing behind.

        Raises:
            FakedistError: This machine or this version of torch cannot run the job.
        """
        self._write_gpu()
        self._journal.append(nccl_record())
        self._recorder.cuda.then(lambda: self._guarded(self._cuda_begins))
        with ExitStack() as recording, ExitStack() as world:
            if self._gpu is not None:
                world.enter_context(self._tuning.taken())
                world.enter_context(event_times(self._inventions.count))
                world.enter_context(kept_triton_key(cache_directory() / "compiled" / "triton-key"))
            self._until_bare = world.enter_context(ExitStack())
            if self._values is not None:
                self._until_bare.enter_context(self._values.below_dispatch())
            is_undefined = None if self._values is None else self._values.is_undefined
            self._tapes = self._make_tapes()
            self._process.own_ranks.record_thread = self.record_this_thread
            faked = fake_world(
                self._job,
                self._recorder.ledger,
                is_undefined,
                self._tapes,
                self._process.own_ranks,
                not_sent=None if self._values is None else self._values.not_sent,
                tell_peer_copies=None if self._gpu is None else self._gpu.tell_peer_copies,
                device=self._device(),
                of_ranks=None if self._values is None or self._load.is_even else self._values.of_ranks,
            )
            self._world_notes = world.enter_context(faked)
            if self._gpu is not None and self._lags:
                world.enter_context(around_calls(partial(self._gpu.as_one, 1), partial(self._gpu.as_one, -1)))
            if self._bare_gpu is not None:
                self._until_bare.enter_context(around_calls(self._bare_gpu.stop, partial(self._bare_gpu.go, 0)))
            if self._gpu is not None:
                world.enter_context(self._stream_uses.watching())
            world.enter_context(warnings_at_the_script())
            world.enter_context(adapted_frameworks(has_peers=self._process.own_ranks.has_peers))
            if self._gpu is not None:
                self._until_bare.enter_context(faster_frameworks())
            recording.enter_context(self._recorder)
            self._world, self._recording = world.pop_all(), recording.pop_all()

    def _device(self) -> Device | None:
        if self._gpu is None:
            return None
        experts = None if self._values is None or self._load.is_even else self._values.experts_of_ranks
        return Device(self._gpu.take, self._gpu.free, self._routes, self._job.gpus_per_node, experts)

    def _whereabouts(self) -> RunningLayer:
        position = self._recorder.position
        return RunningLayer(position.layer, position.in_backward(), position.step, position.op)

    def _routes(self, indices: torch.Tensor, num_experts: int) -> torch.Tensor:
        """The experts of each token. What the device holds is stale once the recording is over."""
        if self._values is None or self.is_recorded:
            picked = self._picked if indices.dtype is torch.bool else indices.shape[1]
            return spread_over_experts(torch.Size([len(indices), picked]), num_experts)
        experts = self._values.routes(indices, num_experts)
        self._picked = experts.shape[1]
        return experts

    @property
    def is_recorded(self) -> bool:
        """Return whether everything is written but the host's time: what the script does now is not recorded."""
        return self._journal.is_over

    def close(self, ending: Ending, line: str) -> None:
        """Write what is still in memory, and how and where the script ended; then the host's time."""
        how = ""
        if self.is_recorded and ending.message:
            how = (
                "fakedist runs steps for that after everything is recorded, without values, and could not run this "
                f"script there: the error is not the script's ({ending.message})"
            )
        if not self.is_recorded:
            self._close(ending, line)
        for record in self._recorder.host_clock.records(how):
            self._process.journal.append(record)

    def _go_bare(self) -> None:
        """Write everything, as if the script were stopped here, and end all but the virtual GPU and the other ranks."""
        assert self._bare_gpu is not None
        assert self._gpu is not None
        self.was_beyond = self._gpu.is_beyond
        with uninterrupted():
            self._close(Ending(Outcome.STOPPED, 0), line_now())
            self._journal.is_over = True
        if self._tapes is not None:
            self._tapes.end()
        if self._values is not None:
            self._values.end()
        self._until_bare.close()
        self._until_bare.enter_context(still_calls(self._bare_gpu.stop, self._bare_gpu.go))

    def _why_not_bare(self) -> str:
        is_left_out = self._values is not None and self._values.leaves_host_out()
        return "operations on large tensors in the host's memory would be computed" if is_left_out else ""

    def _close(self, ending: Ending, line: str) -> None:
        if self._gpu is None and self._recorder.cuda.is_past:
            torch.cuda.init()  # C++ may have initialised CUDA without Python's knowledge
            self._write_gpu()
        self._write_facts()
        self._write_decisions()
        self._write_routers()
        self._write_not_computed()
        self._write_about_the_world()
        self._write_likely_cause(ending.outcome)
        self._write_outside_torch()
        self._write_traced()
        self._recorder.close(ending, line)

    def stop_recording(self) -> None:
        """Remove the recorder's hooks from torch. The faked world stays for the script's exit handlers."""
        self._recording.close()
        if self._has_launches:
            self._has_launches = False
            self._write_machine_score()

    def leave(self) -> None:
        """Take everything down. No code of the script runs any more."""
        self.stop_recording()
        self._world.close()

    def record_this_thread(self) -> None:
        """Also record the operations of this thread, after another thread imported torch."""
        self._recorder.record_this_thread()

    @property
    def stopped(self) -> bool:
        """Return whether the run was ended after its last step."""
        return self._recorder.stopped

    def _make_recorder(self) -> Recorder:
        job = self._job
        if self._gpu is not None and job.values != "off":
            self._values = ValueEngine(job.seed, strict=job.values == "strict")
            self._inventions = self._values.host.inventions
        execute = None if self._values is None else self._values.execute
        fast_path = make_fast_path(self._values)
        if fast_path is None:
            self._journal.append(NoteRecord(notes.host_memory_not_recorded()))
        tracer = self._model_tracer(fast_path)
        return Recorder(
            self._append,
            job.steps,
            execute,
            self._progress,
            tracer,
            later_tracer=_later_tracer(job),
            until=job.until,
            updates=job.updates_per_step,
            fast_path=fast_path,
            integers=None if self._values is None else self._values.graphs,
            capacity=self._gpu if job.oom == "continue" else None,
            clocked=self._bare_gpu,
            go_bare=self._go_bare,
            why_not_bare=self._why_not_bare,
            runs_again=job.clock_run,
            own_bytes=lambda: self._process.journal.num_bytes + self._process.tape.num_bytes - saved.holes_bytes,
            device=None if self._gpu is None else _Device(self._gpu, self._device_index),
        )

    def _cuda_begins(self) -> None:
        self._process.cuda_begins()
        if self._gpu is not None and self._lags:
            self._gpu.lag(os.environ.get(LAUNCH_QUEUES, ""))
        check_allocator()
        self._settings = allocator_settings()
        self._write_gpu()

    def _make_tapes(self) -> Tapes:
        if self._process.own_ranks.has_peers:
            return PeerTapes()
        job = self._job
        known = None
        if self._values is not None:
            known = self._values.settled
        elif job.device == "virtual":
            known = _unless_on_device
        self._process.tape.append(script_identity(job, os.getcwd()))

        def command(ranks: Sequence[int]) -> str:
            if len(ranks) > 1:
                return profile_command(dataclasses.replace(job, with_peers=False), ranks)
            return "" if job.with_peers else profile_command(dataclasses.replace(job, with_peers=True))

        return Tapes(self._process.tape.append, known, find_tapes(job), job.rank, command)

    def _write_about_the_world(self) -> None:
        if self._tapes is not None:
            self._tapes.close(sys.exc_info()[1])
            for record in self._tapes.not_sent():
                self._journal.append(record)
        for note in (*self._world_notes(), *self._tuning.notes()):
            self._journal.append(NoteRecord(note))

    def _model_tracer(self, fast_path: CompiledFastPath | None) -> OperationTracer | None:
        if not self._job.kernels or self._gpu is None or _rehearses():
            return None
        from fakedist.gpu.launch_log import LaunchLog
        from fakedist.gpu.model_tracer import ModelTracer

        numbers = None if fast_path is None else fast_path.tags()
        log = LaunchLog()
        # Tests compare the recording with and without the clock.
        clock = None if os.environ.get("FAKEDIST_HOST_CLOCK") == "0" else DriverClock()
        if self._values is None:
            tracer = ModelTracer(numbers=numbers, log=log, clock=clock)
        else:
            tracer = ModelTracer(self._values.known, numbers, log, clock=clock)
            tracer.keep_reads = self._values.keep_reads

        def timed() -> TimedLaunches | None:
            return tracer.timed

        self._bare_gpu = None if clock is None else BareGpu(log, clock, timed, self._process.first_run)
        return tracer

    def _write_gpu(self) -> None:
        """Write what is known of the rank's GPU. A real GPU is queried only once CUDA is initialised."""
        job = self._job
        found = GpuRecord(
            torch=str(torch.__version__),
            cuda=torch.version.cuda or "",
            python=platform.python_version(),
            device_index=self._device_index(),
            alloc_conf=self._settings,
            launch_queues=os.environ.get(LAUNCH_QUEUES, ""),
        )
        if self._gpu is not None:
            spec = find_gpu(job.gpu, job.gpu_power_watts)
            found = dataclasses.replace(
                found,
                gpu_name=spec.product,
                spec_memory_bytes=spec.memory_bytes,
                capacity_bytes=job.gpu_memory_bytes or spec.memory_bytes,
                compute_capability=".".join(map(str, spec.compute_capability)),
                peaks=Peaks(dict(spec.peak_flops), spec.memory_bandwidth),
                model=spec,
            )
        elif properties := getattr(torch.cuda, "_get_device_properties", None):  # exists once torch.cuda is initialised
            gpu = properties(self._device_index())
            found = dataclasses.replace(
                found,
                gpu_name=gpu.name,
                capacity_bytes=gpu.total_memory,
                compute_capability=f"{gpu.major}.{gpu.minor}",
                peaks=_peaks(gpu.name),
            )
        self._journal.append(found)

    def _device_index(self) -> int:
        """The rank's device among those the process sees, which CUDA_VISIBLE_DEVICES may restrict.

        A process that the script started is on whichever it chose.
        """
        if self._process.own_ranks.is_started and torch.cuda.is_initialized():
            return torch.cuda.current_device()
        wanted = self._job.device_index
        visible = [] if self._gpu is None else self._gpu.visible()
        if not visible or wanted < len(visible):
            return wanted
        return visible.index(wanted) if wanted in visible else 0

    def _progress(self, phase: str, step: int, allocated_bytes: int) -> None:
        self._process.reporter.send(Progress(phase, step, self._job.steps, allocated_bytes))
        if time.monotonic() - self._facts_at > _FACTS_EVERY_S:
            self._write_facts()

    def _write_facts(self) -> None:
        self._facts_at = time.monotonic()
        invented, idle = self._inventions.take()
        if invented:
            self._journal.append(InventedRecord(invented, idle))
        if self._gpu is not None:
            refused = self._gpu.refused()
            if (calls := sum(count for _, count in refused)) != self._refused:
                self._refused = calls
                self._journal.append(UnansweredRecord([UnansweredRow(*row) for row in refused]))

    def _write_decisions(self) -> None:
        for note in [] if self._values is None else self._values.decisions():
            self._journal.append(NoteRecord(note))

    def _write_routers(self) -> None:
        facts = None if self._values is None else self._values.router_facts()
        if facts is not None:
            self._journal.append(RouterLoadRecord(facts))
            if self._values is not None:
                self._journal.append(RouterPassesRecord(self._values.router_passes()))
        elif not self._load.is_even:
            self._journal.append(NoteRecord(notes.router_load_unused(self._load.text)))

    def _write_not_computed(self) -> None:
        operations, first = self._values.not_computed_on_host() if self._values is not None else (0, "")
        if operations:
            self._journal.append(NoteRecord(notes.host_not_computed(operations, first)))

    def _append(self, record: Record) -> None:
        self._has_launches |= isinstance(record, LaunchesRecord)
        self._journal.append(record)

    def _write_machine_score(self) -> None:
        """Write how fast this machine is, once the run is recorded. A process that is out of memory has no score."""
        with suppress(RuntimeError):
            clock = DriverClock()
            with clock.without_effects():
                self._process.journal.append(machine_score(clock.pace_us))

    def _write_traced(self) -> None:
        if self._gpu is None:
            return
        for note in self._gpu.notes():
            self._journal.append(NoteRecord(note))
        lines = self._stream_uses.most()
        if lines and sum(num_bytes for _, _, num_bytes in lines) > _WORTH_A_NOTE * torch.cuda.max_memory_reserved():
            made = notes.streams_keep_most if self._lags else notes.streams_keep_least
            self._journal.append(NoteRecord(made(lines)))
        if (launches := self._gpu.traced()) and not _rehearses():
            self._journal.append(NoteRecord(notes.profiler_saw_virtual_gpu(launches)))

    def _write_likely_cause(self, outcome: Outcome) -> None:
        if outcome is Outcome.EXCEPTION and self._job.device == "virtual" and self._job.values == "off":
            self._journal.append(NoteRecord(notes.values_off()))

    def _write_outside_torch(self) -> None:
        self._journal.append(nccl_record())
        if (
            self._gpu is None
            and self._recorder.cuda.is_past
            and (found := outside_record(self._device_index())) is not None
        ):
            self._journal.append(found)
        if self._gpu is not None:
            device = self._device_index()
            peak, backed = self._gpu.outside_peak(device), self._gpu.backed_peak(device)
            if peak or backed < torch.cuda.max_memory_reserved(device):
                self._journal.append(TakenRecord(device, peak, self._gpu.outside(device), backed))
            processes, rows = self._gpu.timeline(device)
            if rows:
                self._journal.append(DeviceUseRecord(processes, rows))


def _unless_on_device(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor, if its values are known. With --values off, no value on the virtual GPU is."""
    return None if tensor.is_cuda else tensor


def _peaks(product: str) -> Peaks | None:
    spec = gpu_of_product(product)
    return None if spec is None else Peaks(dict(spec.peak_flops), spec.memory_bandwidth)


def _later_tracer(job: Job) -> Tracer | None:
    if job.nsys:
        return NsysTracer()
    if not job.kernels or (job.device == "virtual" and not _rehearses()):
        return None
    return CuptiTracer("measured" if job.device == "cuda" else "simulated")


def _rehearses() -> bool:
    """Return whether a step on the virtual GPU is timed as on a real one. Everything but the times is then the same."""
    return os.environ.get("FAKEDIST_REHEARSE") == "cupti"
