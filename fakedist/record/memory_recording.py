"""Records operations and memory: from before the model is built to the last recorded step, or to the run's end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch._ops import OpOverload

from fakedist.frames import script_line, script_lines
from fakedist.record.compiled_graphs import Compilations, compilations, compiled_graphs
from fakedist.record.construction import Construction
from fakedist.record.copies import Copies
from fakedist.record.device_memory import (
    AllocatorHistory,
    Beginning,
    allocator_history,
    changed_settings,
)
from fakedist.record.graph_layers import Placing, find_layers
from fakedist.record.hooks import fsdp_is_loaded, fsdp_unshard_hook, out_of_memory_observer, tensor_swaps
from fakedist.record.host_ledger import HostLedger
from fakedist.record.ledger import Ledger
from fakedist.record.marks import Marks
from fakedist.record.module_names import LayerTable
from fakedist.record.numbering import FastPath
from fakedist.record.operations import Execute, Operations
from fakedist.record.position import Position
from fakedist.record.running_graphs import GraphIntegers, RunningGraphs
from fakedist.record.unseen import Unseen, compiles_backwards
from fakedist.rundir.encoding import Record
from fakedist.rundir.memory_records import AllocatorSettingsRecord, FailedRequestRecord
from fakedist.rundir.records import LayersRecord, OperationNamesRecord, RegionsRecord, ScopesRecord

Append = Callable[[Record], None]


class MemoryRecording:
    """Operations, blocks of memory and the calls on process groups. See :class:`~fakedist.record.recorder.Recorder`."""

    def __init__(
        self,
        append: Append,
        position: Position,
        layers: LayerTable,
        execute: Execute | None,
        progress: Callable[[str, int, int], None],
        *,
        fast_path: FastPath | None,
        integers: GraphIntegers | None,
    ) -> None:
        self.is_on = True
        self._append = append
        self._position = position
        self._layers = layers
        self._executes = execute is not None
        self._execute = execute or _run_plainly
        self.cuda = Beginning()
        # Before CUDA is initialised, the allocator cannot take the number of an operation: it would ask for the device.
        self.operations = Operations(
            position, self._execute_before_cuda, self.tick, lambda text: None, fast_path=fast_path
        )
        self._marks = Marks(position, layers, None if fast_path is None else fast_path.marker)
        self._copies = Copies(layers, self._marks)
        self._construction = Construction(position, layers, self._marks, self._copies, self.operations.report_results)
        self._compilations = Compilations(lambda modules: find_layers(modules, layers), lambda: position.layer)
        placing = Placing(layers, self._compilations)
        self.graphs = RunningGraphs(self.operations, position, placing, integers)
        take_gemms = self.operations.numbering.take_gemms
        self.history = AllocatorHistory(
            append, take_gemms, fast_path, self._marks.workspace, nodes=self.operations.nodes
        )
        self.host = HostLedger(append, position, fast_path, self.history.keep_numbers)
        self.ledger = Ledger(
            append, lambda: (position.op, position.scope()), self._marks.communication, self._marks.gathered
        )
        self.drain = Drain(
            append,
            position,
            progress,
            layers=layers,
            operations=self.operations,
            history=self.history,
            marks=self._marks,
            placing=placing,
            ledger=self.ledger,
            host=self.host,
        )
        self._scanned: set[int] = set()
        self._backwards: list[Callable[[], None] | None] = []
        self._observe_failures: Callable[[], None] = lambda: None
        self._hooks, self._until_stop = ExitStack(), ExitStack()
        self._watches_fsdp = False

    @contextmanager
    def watching(self, unseen: Unseen) -> Iterator[None]:
        """Hook the allocator, models and compiled graphs. :meth:`stop` removes the allocator's hooks before that."""
        with ExitStack() as self._hooks:
            self._until_stop = self._hooks.enter_context(ExitStack())
            self._until_stop.enter_context(allocator_history(self.history))
            self._until_stop.enter_context(changed_settings(self._settings_changed))
            self._until_stop.callback(self._marks.close)
            self._observe_failures = self._hooks.enter_context(out_of_memory_observer(self._out_of_memory))
            self._hooks.enter_context(self._construction.watching(unseen))
            self._hooks.enter_context(tensor_swaps(self._marks.released))
            self._hooks.enter_context(compiled_graphs(self._graph, self._compilations))
            self._hooks.enter_context(compilations(self.drain.compiling))
            yield

    @contextmanager
    def routing(self) -> Iterator[None]:
        """Have operations come here, and CUDA's initialisation."""
        # With an `execute` of its own, the run needs it until the end, past the memory recording.
        with ExitStack() as stack:
            (stack if self._executes else self._until_stop).enter_context(self.operations)
            stack.enter_context(self.cuda.watching())
            self.cuda.then(self._cuda_begins)
            yield

    def _settings_changed(self, alloc_conf: str) -> None:
        self._append(AllocatorSettingsRecord(self._position.op, alloc_conf))

    def _cuda_begins(self) -> None:
        if self.is_on:
            self.history.start()
        self._observe_failures()
        number = self.history.number
        number(str(self._position.op - 1))  # the operation that is running, if any
        self.operations.cuda_begins(self._execute, number)

    def _execute_before_cuda(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        self.cuda.before(kwargs)
        return self._execute(func, args, kwargs)

    def tick(self) -> None:
        """Drain and report progress, each if it is due."""
        if self.is_on:
            self.drain.tick()

    # ---- modules, backwards and optimizers

    def model_begins(self, module: nn.Module) -> None:
        """Mark a model's parameters before it first runs, while FSDP's are still sharded."""
        if not self.is_on:
            return
        if fsdp_is_loaded() and not self._watches_fsdp:
            self._watches_fsdp = True
            self._hooks.enter_context(fsdp_unshard_hook(self._unsharded))
        if id(module) not in self._scanned:
            self._scanned.add(id(module))
            self._marks.scan(module)
            self._construction.mark()

    def module_ended(self, module: nn.Module, layer: int) -> None:
        """Mark a module's own parameters."""
        if self.is_on and module._parameters:
            self._marks.module(module, layer)

    def backward_begins(self) -> None:
        """Take our hooks off the parameters if torch compiles the backward that begins."""
        self._backwards.append(self._marks.compiled_backward() if self.is_on and compiles_backwards() else None)

    def backward_ended(self) -> None:
        """Put the hooks back."""
        if (put_back := self._backwards.pop()) is not None:
            put_back()

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark an optimizer's gradients and state, and copies of the parameters."""
        if self.is_on:
            self._marks.optimizer(optimizer)
            self._copies.mark_once(self._position.step, self._position.op)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the state that the step has made."""
        if self.is_on:
            self._marks.optimizer(optimizer)

    def _unsharded(self, module: nn.Module, parameter: torch.Tensor) -> None:
        if self.is_on:
            self._marks.parameter(parameter, self._layers.layer(module))

    def _graph(self, compiled: object, inputs: Sequence[object]) -> AbstractContextManager[Callable[[object], None]]:
        return self.graphs.graph(compiled, inputs) if self.is_on else nullcontext(lambda results: None)

    def _out_of_memory(self, device: int, requested: int, device_total: int, device_free: int) -> None:
        failed = FailedRequestRecord(
            device,
            requested,
            op=self._position.op - 1,
            layer=self._layers.name(self._position.layer),
            line=script_line(),
            message=f"{device_free} bytes of the device were free",
            stack=script_lines(sys._getframe()),
        )
        self._append(failed)

    # ---- ends

    def step_ended(self) -> None:
        """Mark what is alive, and write what the step left in memory."""
        self.host.look()
        self._scan()
        self._marks.step_ended()
        self.drain.all()

    def close(self) -> None:
        """Mark what is alive, and end what is open. :meth:`write` follows."""
        if self.is_on:
            self.host.close()
            self._marks.optimizers()
            self._scan()
            self._close()

    def write(self) -> None:
        """Write the rest, with the allocator's statistics."""
        if self.is_on:
            self.drain.all()
            for record in self.history.statistics():
                self._append(record)
            self.host.stop()

    def stop(self) -> None:
        """Stop before the timed step, which recording must not slow down and which is not in the memory tables."""
        self._close()
        self.write()
        self.is_on = False
        self.operations.stop_recording()
        self._until_stop.close()

    def _scan(self) -> None:
        for root in self._layers.roots():
            self._marks.scan(root)
        self._copies.mark(self._position.op)

    def _close(self) -> None:
        self._construction.mark(is_over=True)
        self._position.close()


def _run_plainly(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return func(*args, **kwargs)


DRAIN_EVERY_S = 2.0  # a rank that is killed loses what happened since the last drain
DRAIN_LEAST_OPS = 4096
DRAIN_EVERY_OPS = 50_000  # about 150 MB of history as Python objects
PROGRESS_EVERY_S = 0.1


class Drain:
    """Empties record holders into the journal; ``progress(phase, step, peak_bytes)`` is at most ten calls a second."""

    def __init__(
        self,
        append: Callable[[Record], None],
        position: Position,
        progress: Callable[[str, int, int], None],
        *,
        layers: LayerTable,
        operations: Operations,
        history: AllocatorHistory,
        marks: Marks,
        placing: Placing,
        ledger: Ledger,
        host: HostLedger,
    ) -> None:
        self._append = append
        self._position = position
        self._progress = progress
        self._layers = layers
        self._operations = operations
        self._history = history
        self._marks = marks
        self._placing = placing
        self._ledger = ledger
        self._host = host
        self._at = self._progress_at = time.monotonic()
        self._op = 0
        self._is_compiling = False

    def tick(self) -> None:
        """Drain and report progress, each if it is due."""
        now = time.monotonic()
        ops = self._position.op - self._op
        if ops >= DRAIN_EVERY_OPS or (now - self._at > DRAIN_EVERY_S and ops >= DRAIN_LEAST_OPS):
            self.all()
        if now - self._progress_at > PROGRESS_EVERY_S:
            self._report()

    def compiling(self, is_on: bool) -> None:
        """Report that torch compiles: for seconds or minutes nothing runs that would report anything."""
        self._is_compiling = is_on
        self._report()

    def _report(self) -> None:
        self._progress_at = time.monotonic()
        peak = 0
        if self._history.is_on:
            peak = torch._C._cuda_memoryStats(torch.cuda.current_device())["allocated_bytes"]["all"]["peak"]
        self._progress("compiling" if self._is_compiling else self._position.phase, self._position.step, peak)

    def all(self) -> None:
        """Empty every source."""
        with self._position.lock:
            self._op = self._position.op
            self.names()
            if names := self._operations.names:
                self._append(OperationNamesRecord(names))
                self._operations.names = []
            self._history.drain()
            self._host.drain()
            if (ran := self._operations.numbering.take()).operation:
                self._append(ran)
            if (marks := self._marks.take()).op:
                self._append(marks)
            if regions := self._position.regions:
                self._append(RegionsRecord(regions))
                self._position.regions = []
            for record in self._placing.take():
                self._append(record)
            self._ledger.flush()
            self._at = time.monotonic()

    def names(self) -> None:
        """Write layers and scopes, which the calls of a timed step need too."""
        if rows := self._layers.new_rows():
            self._append(LayersRecord(rows))
        if scopes := self._position.new_scopes:
            self._append(ScopesRecord(scopes))
            self._position.new_scopes = []
