"""Operations in compiled code are recorded as Python records them, and leave the same values."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.training import training
from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    pass

#: A program returns what it read.
Program = Callable[[], list[object]]


class Seen:
    """A program's journal without times and addresses, which are numbered in the order they come in."""

    def __init__(self, read: list[object]) -> None:
        self.read = read
        self.passed = 0
        self.rows: dict[str, list[object]] = {}

    def add(self, kind: str, rows: list[object]) -> None:
        self.rows.setdefault(kind, []).extend(rows)


def _ints(code: str, packed: bytes) -> list[int]:
    found = array(code)
    found.frombytes(packed)
    return found.tolist()


def _recorded(program: Program, *, compiled: bool) -> Seen:
    import torch

    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.recorder import Recorder
    from fakedist.rundir.collector import no_collector
    from fakedist.rundir.outcome import Ending, Outcome

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    records: list[Any] = []
    engine = ValueEngine(0)
    fast_path = CompiledFastPath(engine) if compiled else None
    recorder = Recorder(records.append, "auto", engine.execute, until="end", fast_path=fast_path)
    with engine.below_dispatch(), recorder, no_collector():  # what is collected when depends on Python's own objects
        # An operator's first call runs in Python, so all that may run in compiled code does in the second round.
        seen = Seen([*program(), *program()])
        recorder.close(Ending(Outcome.FINISHED, 0))
    seen.passed = 0 if fast_path is None else fast_path.passed
    seen.add("made up", list(engine.invented()))
    _read(records, seen)
    return seen


def _read(records: list[Any], seen: Seen) -> None:
    addresses: dict[int, int] = {}

    def numbered(packed: bytes) -> list[int]:
        return [addresses.setdefault(address, len(addresses)) for address in _ints("Q", packed)]

    for record in records:
        kind = type(record).__name__.removesuffix("Record")
        if kind == "Operations":
            seen.add("operation", list(zip(_ints("I", record.operation), _ints("I", record.scope), strict=True)))
        elif kind == "Events":
            columns = (_ints("B", record.action), numbered(record.address), _ints("q", record.size))
            seen.add("event", list(zip(*columns, _ints("q", record.op), _ints("i", record.stack), strict=True)))
            seen.add("frame", [row for row in record.frames if "test_fast_path" not in row.filename])
            seen.add("stack", list(record.stacks))
        elif kind == "Marks":
            columns = (_ints("q", record.op), numbered(record.address), _ints("B", record.category))
            seen.add("mark", list(zip(*columns, _ints("i", record.layer), _ints("q", record.size), strict=True)))
        elif kind in ("Scopes", "Layers", "OperationNames", "Regions", "Statistics", "FailedRequest"):
            seen.add(kind, [repr(record)])
    seen.add("line", _lines(records)[0])


def _lines(records: list[Any]) -> tuple[list[object], list[object]]:
    """The line of each event, and of each operation of the timed step; that of the forward for a backward's."""
    from fakedist.analysis.recording import JournalReading
    from fakedist.analysis.stack_lines import stack_lines

    reading = JournalReading()
    for record in records:
        reading.take(record)
    reading.join()
    recording = reading.recording
    lines = [*stack_lines(recording.frames, recording.stacks), ""]
    of_events = [lines[stack] for columns in recording.events.values() for stack in columns["stack"]]
    called = recording.operation_stacks
    return of_events, [(op, lines[stack]) for op, stack in zip(called["op"], called["stack"], strict=True)]


def _agree(program: Program, least: float) -> None:
    """Both ways agree on a program, of which compiled code runs at least this share."""
    python, compiled = _recorded(program, compiled=False), _recorded(program, compiled=True)
    assert python.passed == 0
    total = len(compiled.rows["operation"])
    assert compiled.passed >= least * total, f"{compiled.passed} of {total}"
    assert compiled.rows.keys() == python.rows.keys()
    for kind, rows in python.rows.items():
        differing = [
            (place, *both)
            for place, both in enumerate(zip(rows, compiled.rows[kind], strict=False))
            if both[0] != both[1]
        ]
        assert not differing, f"{kind}: {differing[:3]}"
        assert len(rows) == len(compiled.rows[kind]), kind
    assert compiled.read == python.read


@pytest.mark.long
@on_virtual_gpu
def test_training_with_recomputation_and_accumulated_gradients() -> None:
    _agree(training, 0.8)


def _values() -> list[object]:
    import torch

    read: list[object] = []
    large = torch.empty(1024, 1024, device="cuda")
    known, other = torch.arange(600.0, device="cuda"), torch.arange(600.0, device="cuda")
    unknown = large.sum(0)[:600]
    torch._foreach_mul_([known, large], 2.0)  # known ones are computed
    read.append(known.sum().item())
    read.append(torch._foreach_add([known, large], 1.0)[0].sum().item())
    torch._foreach_add_([other, large], [unknown, large])  # and spoiled by what is not known
    read.append(other.sum().item())
    known.add_(unknown)
    read.append(known.sum().item())
    spoiled = torch.ones(600, device="cuda")
    spoiled.addcmul_(unknown, unknown)  # nothing else is known of its result
    read.append(spoiled.sum().item())
    weights = torch.ones(1024, device="cuda")
    weights.copy_(large[0])
    weights.mul_(2)
    read += weights.tolist()[:4]
    mask = large > 0  # half of it is true
    read.append(large[mask].shape[0])
    small_mask = torch.arange(8, device="cuda") % 2 == 0
    read.append(torch.arange(8, device="cuda")[small_mask].tolist())
    zeros = torch.zeros(1024, 1024, device="cuda")
    read.append((zeros.sum() == 0).item())
    zeros += large  # nothing is known of it any more
    read.append(zeros.sum().item())
    read.append(torch.isfinite(large).all().item())
    read.append(torch.relu(large).sum().item() >= 0)
    read += [norm.item() >= 0 for norm in torch._foreach_norm([large, large * 2])]
    picked = large.view(64, -1).topk(2, dim=1).indices
    read += picked[:3].tolist()
    read += torch.cat([torch.ones(3, device="cuda"), torch.zeros(2, device="cuda")]).tolist()
    read.append(large.view(-1)[::2].to("cpu").shape)
    host = torch.arange(10.0)
    read.append((host * 2).sum().item())
    read.append(str(torch.full((3,), 2, device="cuda")))
    empty_mask = torch.empty(4, dtype=torch.bool, device="cuda")
    read.append(empty_mask.shape)
    return read


@on_virtual_gpu
def test_values_are_the_same_wherever_an_operation_ran() -> None:
    _agree(_values, 0.1)


def _views() -> list[object]:
    """Operations that autograd does not decompose: ``reshape`` and ``to`` are one each."""
    import torch

    read: list[object] = []
    with torch.inference_mode():
        large, small = torch.empty(1024, 1024, device="cuda"), torch.arange(24.0, device="cuda").view(4, 6)
        for _ in range(20):
            read.append(large.reshape(2048, 512).reshape(-1).shape)
            read.append(large.t().reshape(-1).to(torch.bfloat16).contiguous().shape)  # a copy
            read.append(large.to(torch.float16).to(small.dtype).flatten().movedim(0, -1).shape)
            read += small.t().reshape(-1).to(torch.int64).tolist()
            read += small.reshape(-1).to("cpu").to(torch.float16).tolist()
            host = torch.arange(6.0).reshape(2, 3)
            read += host.to(small).t().reshape(-1).tolist()
            read += large[0, :4].reshape(2, 2).to(host).tolist()  # made up, on the host
            read += large.reshape(-1)[:3].tolist()
            read.append(torch.empty(8, 8, device="cuda").t().reshape(-1).sum().item())  # few enough to be made up
    return read


@on_virtual_gpu
def test_views_that_may_copy_are_the_same_wherever_they_ran() -> None:
    _agree(_views, 0.3)


def _losses() -> list[object]:
    import torch

    read: list[object] = []
    for number in range(12):
        weights = torch.empty(512 + number, 512, device="cuda", requires_grad=True)
        loss = weights.sum()
        read.append(loss.detach().clone().item() >= 0)  # a backward may begin here
        read.append((weights.detach().sum() - 1).item())
    return read


@on_virtual_gpu
def test_a_loss_is_known_not_to_be_negative() -> None:
    _agree(_losses, 0.2)
    assert all(read for read in _recorded(_losses, compiled=True).read if isinstance(read, bool))


def _without_memory() -> list[object]:
    import torch

    read: list[object] = []
    held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        try:
            torch.empty(1 << 20, device="cuda").expand(1 << 15, 1 << 20).contiguous()
        except torch.OutOfMemoryError as error:
            read.append("Tried to allocate" in str(error))
        read.append(torch.cuda.memory_allocated())
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    try:
        (x.expand(1 << 16, 1 << 20) * 2).sum().backward()
    except torch.OutOfMemoryError:
        read.append(torch.cuda.memory_allocated())
    del held
    read.append(torch.empty(40 << 30, dtype=torch.uint8, device="cuda").shape)
    return read


@on_virtual_gpu
def test_running_out_of_memory() -> None:
    _agree(_without_memory, 0.1)


def _with_subclasses() -> list[object]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map

    class Wrapped(torch.Tensor):
        inner: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Wrapped:
            made: Wrapped = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, dtype=inner.dtype, device=inner.device
            )
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            unwrap = lambda value: value.inner if isinstance(value, Wrapped) else value  # noqa: E731
            result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
            return Wrapped(result) if isinstance(result, torch.Tensor) else result

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    large = torch.empty(1024, 1024, device="cuda")
    wrapped = Wrapped(large)
    read: list[object] = [type((wrapped @ wrapped).add_(1)).__name__, torch.mul(wrapped, large).shape]
    read.append(len(torch._foreach_add([wrapped, wrapped], 1.0)))
    with Mode():
        large.mul_(2).t() @ large
    with FakeTensorMode() as fake:
        read.append((fake.from_tensor(large) @ torch.empty(1024, 7, device="cuda")).shape)
    read.append(torch.func.vmap(lambda row: row * 2)(large).shape)
    sparse = torch.eye(2000, device="cuda").to_sparse()
    read.append((sparse.coalesce() * 2).to_dense().shape)
    graph, static = torch.cuda.CUDAGraph(), torch.zeros(16, device="cuda")
    with torch.cuda.graph(graph):
        doubled = static.add_(1) * 2
        large.mul_(3)
    graph.replay()
    read.append(doubled.sum().item())
    doubled.copy_(large[0, :16])
    read.append(doubled.sum().item())
    return read + names


@on_virtual_gpu
def test_subclasses_modes_and_graphs() -> None:
    _agree(_with_subclasses, 0.1)


def _in_threads() -> list[object]:
    import torch

    x = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    y = torch.ones(8, requires_grad=True)
    for _ in range(20):
        ((x * 2).sum() + (y * 3).sum().cuda()).backward()
    with torch.inference_mode():
        read: list[object] = [torch.empty(300, 300, device="cuda").to(torch.float16).reshape(-1).shape]
    return [*read, torch.autograd.functional.hessian(lambda z: (z**3).sum(), torch.ones(2)).tolist()]


@on_virtual_gpu
def test_a_backward_that_runs_in_two_threads() -> None:
    import torch

    before = torch.autograd.is_multithreading_enabled()
    with torch.autograd.set_multithreading_enabled(True):
        found = _recorded(_in_threads, compiled=True)
    assert before
    assert found.passed > 100
    numbers = [number for number, *_ in found.rows["operation"]]  # type: ignore[misc]
    assert len(numbers) == len(_recorded(_in_threads, compiled=False).rows["operation"])


def _launched(*, compiled: bool) -> tuple[Any, int, list[object]]:
    """The record of a timed step's launches, how many operations compiled code ran, and the lines of the step's.

    Compiled code runs operations of the other steps in any case.
    """
    from fakedist.errors import StopRun
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.gpu.model_tracer import ModelTracer
    from fakedist.gpu.values.engine import ValueEngine
    from fakedist.record.recorder import Recorder
    from fakedist.rundir.collector import no_collector
    from fakedist.rundir.launch_records import LaunchesRecord

    records: list[Any] = []
    engine = ValueEngine(0)
    fast_path = CompiledFastPath(engine)
    tracer = ModelTracer(engine.known, fast_path.tags() if compiled else None)
    recorder = Recorder(records.append, 3, engine.execute, tracer=tracer, fast_path=fast_path)
    with engine.below_dispatch(), recorder, no_collector(), contextlib.suppress(StopRun):
        training()
    (launches,) = (record for record in records if isinstance(record, LaunchesRecord))
    return launches, fast_path.passed, _lines(records)[1]


@on_virtual_gpu
def test_launches_of_the_timed_step_are_the_same_wherever_an_operation_ran() -> None:
    import torch

    both = []
    for compiled in (False, True):
        gc.collect()
        torch.cuda.empty_cache()
        both.append(_launched(compiled=compiled))
    (python, passed, lines), (fast, passed_more, fast_lines) = both
    assert len(lines) > 300
    assert sum("backward)" in repr(line) for line in lines) > 30
    assert fast_lines == lines
    assert passed_more > passed + 300
    assert len(python.work) > 300
    for field in dataclasses.fields(python):
        if field.name != "event":  # a process numbers its events
            assert repr(getattr(fast, field.name)) == repr(getattr(python, field.name)), field.name


@on_virtual_gpu
def test_objects_are_found_by_their_types_as_in_python() -> None:
    from fakedist.gpu.fast_path.compiled import CompiledFastPath
    from fakedist.record import alive

    class Hostile(type):
        def __eq__(cls, other: object) -> bool:
            raise RuntimeError

        def __hash__(cls) -> int:
            raise RuntimeError

    class Held(dict[str, int], metaclass=Hostile):
        pass

    held: list[object] = [Held(a=1), [], {}, Held(), "text", 1.5, Hostile]
    compiled, python = CompiledFastPath(None).types, alive._InPython()
    assert compiled is not None
    for objects in (held, [], gc.get_objects()):
        types = python.types(objects)
        assert list(map(id, compiled.types(objects))) == list(map(id, types))
        for wanted in ([each for each in types if issubclass(each, dict)], types, []):
            found = compiled.of_types(objects, wanted)
            assert list(map(id, found)) == list(map(id, python.of_types(objects, wanted)))
        holders = [each for each in types if each is list or issubclass(each, dict)]
        for lengths in ({0}, {1, 3}, set()):
            found = compiled.holding(objects, holders, lengths)
            assert list(map(id, found)) == list(map(id, python.holding(objects, holders, lengths)))
    alive.find_types_with(compiled)
    assert [id(each) for each in alive.alive(lambda of: of is Held)] == [id(held[0]), id(held[3])]
