"""Phases, steps, layers and categories of snapshots, from stacks like those that torch 2.11 writes.

The snapshots are made here, event by event, in the form of ``torch.cuda.memory._snapshot()``.

Memory of torch.profiler's traces, recorded with profile_memory=True.

The events are written by hand in the form of torch 2.15's export.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.recording import Recording
from fakedist.analysis.stack_lines import stack_lines
from fakedist.report.content.memory import held_lines
from fakedist.results.building import open_imported
from fakedist.results.run import Run
from fakedist.rundir.rows import FrameRow
from fakedist.traces.one_step import StepChoice
from fakedist.traces.snapshot_reading import NoSnapshotError, read_foreign
from fakedist.traces.stack_evidence import BACKWARD, BLANK, FORWARD, OPTIMIZER, UNKNOWN, read_evidence
from tests.unit.traces.test_chrome_trace import Written, event

Frame = tuple[str, int, str]
MODULE, SITE = "/v/lib/python3.12/site-packages/torch/nn/modules/module.py", "/v/lib/python3.12/site-packages/torch/"
MAIN: list[Frame] = [("/job/train.py", 90, "<module>")]
LOSS: list[Frame] = [("/job/train.py", 31, "step"), *MAIN]
MALLOC: list[Frame] = [("??", 0, "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(void**)")]
ENGINE: list[Frame] = [
    *MALLOC,
    ("??", 0, "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"),
    ("Functions.cpp", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
    ("", 0, "torch::autograd::Node::operator()(std::vector<at::Tensor>&&)"),
    ("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"),
]
STEP: list[Frame] = [
    (f"{SITE}optim/adamw.py", 120, "_init_group"),
    (f"{SITE}optim/optimizer.py", 533, "wrapper"),
    ("/job/train.py", 33, "step"),
    *MAIN,
]
ZERO: list[Frame] = [(f"{SITE}optim/optimizer.py", 1020, "zero_grad"), ("/job/train.py", 34, "step"), *MAIN]


def inside(*calls: Frame) -> list[Frame]:
    """The stack of a module's forward, from the outermost line inwards."""
    frames = list(LOSS)
    for call in calls:
        frames = [call, (MODULE, 1790, "_call_impl"), (MODULE, 1779, "_wrapped_call_impl"), *frames]
    return frames


class Made:
    """A snapshot that grows. With ``native`` stacks, all begin with a frame of C++."""

    def __init__(self, *, native: bool = True) -> None:
        self.trace: list[dict[str, Any]] = []
        self.held: dict[int, int] = {}
        self.native, self._next = native, 1 << 20
        self.ranges: list[dict[str, Any]] = []

    def add(self, action: str, at: int, size: int, frames: list[Frame]) -> None:
        stack = [{"filename": name, "line": line, "name": function} for name, line, function in frames]
        self.trace.append({"action": action, "addr": at, "size": size, "stream": 0, "frames": stack})
        self.trace[-1]["time_us"] = len(self.trace)

    def alloc(self, size: int, frames: list[Frame]) -> int:
        at, self._next = self._next, self._next + (64 << 20)
        own = [frame for frame in frames if self.native or frame[1]]
        self.add("alloc", at, size, [*(MALLOC if self.native and own[:1] != MALLOC else []), *own])
        self.held[at] = size
        return at

    def free(self, at: int, frames: list[Frame] | None = None) -> None:
        for action in ("free_requested", "free_completed"):
            self.add(action, at, self.held[at], [frame for frame in frames or [] if self.native or frame[1]])
        del self.held[at]

    def before(self, size: int) -> int:
        at, self._next = self._next, self._next + (64 << 20)
        self.held[at] = size
        return at

    def write(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot()))
        return path

    def read(self) -> Recording:
        return read_foreign(self.snapshot()).recording

    def snapshot(self) -> dict[str, object]:
        blocks = [
            {"address": at, "size": -(-size // 512) * 512, "state": "active_allocated"}
            for at, size in self.held.items()
        ]
        segments = [
            {"address": block["address"], "total_size": 64 << 20, "device": 0, "blocks": [block]} for block in blocks
        ]
        return {"device_traces": [self.trace], "segments": segments, "external_annotations": self.ranges}

    def step(self, weights: list[int], *, backwards: int = 1, optimizes: bool = True) -> None:
        """Forward, loss, backward that leaves gradients, and the optimizer's step."""
        gradients: list[int] = []
        for _ in range(backwards):
            kept = [self.alloc(5120, inside(("/job/model.py", 20, "forward"))), self.alloc(1024, LOSS)]
            work = self.alloc(9216, ENGINE)
            if not gradients:
                gradients = [self.alloc(size, ENGINE) for size in weights]
            for at in (*kept, work):
                self.free(at, ENGINE)
        if optimizes:
            self.free(self.alloc(2048, STEP), STEP)
        for at in gradients:
            self.free(at, ZERO)


def categories(recording: Recording) -> list[tuple[int, str]]:
    frame = build_blocks(recording).frame
    return list(zip(frame["requested_bytes"].tolist(), frame["category"].astype(str).tolist(), strict=True))


def phases(recording: Recording) -> list[tuple[int, str]]:
    places = event_places(recording)
    rows = zip(places["step"].tolist(), places["phase"].astype(str).tolist(), strict=True)
    return list(dict.fromkeys(rows))


@pytest.mark.parametrize("native", [True, False], ids=["C++ and Python", "Python alone"])
def test_blocks_are_what_their_lives_and_stacks_make_them(native: bool) -> None:
    made = Made(native=native)
    weights = [made.before(size) for size in (4096, 8192)]
    states = [made.before(size) for size in (4096, 8192, 4096, 8192)]
    made.alloc(77_824, LOSS)
    made.step([4096, 8192])
    recording = made.read()
    assert len(weights) + len(states) == 6
    found = categories(recording)
    assert found[:6] == [(4096, "parameter"), (8192, "parameter")] + [
        (size, "optimizer_state") for size in (4096, 8192, 4096, 8192)
    ]
    assert found[6:] == [
        (77_824, "other"), (5120, "activation"), (1024, "activation"), (9216, "temporary"),
        (4096, "gradient"), (8192, "gradient"), (2048, "temporary"),
    ]  # fmt: skip
    assert [phase for _, phase in phases(recording) if phase != "other"] == [
        "init", "forward", "backward", "optimizer"
    ]  # fmt: skip


def test_what_is_freed_after_all_training_was_there_throughout() -> None:
    made = Made()
    weights = [made.alloc(size, MAIN) for size in (4096, 8192)]
    made.step([4096, 8192])
    for at in weights:
        made.free(at, MAIN)
    made.free(made.alloc(512, MAIN), MAIN)
    assert categories(made.read())[:2] == [(4096, "parameter"), (8192, "parameter")]


def test_states_that_a_step_makes_and_keeps_are_the_optimizers() -> None:
    made = Made()
    made.before(4096)
    made.step([4096], optimizes=False)
    made.alloc(4096, STEP)
    made.alloc(512, LOSS)
    assert "optimizer_state" in dict(map(reversed, categories(made.read())))  # type: ignore[arg-type]


@pytest.mark.parametrize(("backwards", "optimizes"), [(1, True), (3, True), (1, False), (3, False)])
def test_steps_end_with_the_optimizer_or_with_zero_grad_not_with_each_backward(backwards: int, optimizes: bool) -> None:
    made = Made()
    made.before(4096)
    for _ in range(3):
        made.step([4096], backwards=backwards, optimizes=optimizes)
    recording = made.read()
    assert [step.step for step in recording.steps] == [1, 2, 3]
    forwards = [step for step, phase in phases(recording) if phase == "forward"]
    assert forwards == [1, 2, 3]


def test_layers_are_numbered_by_how_often_a_line_calls_them() -> None:
    made = Made()
    for _ in range(2):  # passes
        for _ in range(3):  # blocks
            for line in (11, 12):
                made.alloc(2048, inside(("/job/model.py", 30, "forward"), ("/job/model.py", line, "forward"),
                                        (f"{SITE}nn/modules/linear.py", 130, "forward")))  # fmt: skip
        made.alloc(4096, inside(("/job/model.py", 31, "forward"), (f"{SITE}nn/modules/linear.py", 130, "forward")))
        made.free(made.alloc(512, ENGINE), ENGINE)
    recording = made.read()
    names = [row.name for row in recording.layers]
    block = "train:31.model:30"
    assert names == [
        "", "train:31",
        f"{block}.0", f"{block}.0.model:11", f"{block}.0.model:12",
        f"{block}.1", f"{block}.1.model:11", f"{block}.1.model:12",
        f"{block}.2", f"{block}.2.model:11", f"{block}.2.model:12",
        "train:31.model:31",
    ]  # fmt: skip
    used = build_blocks(recording).frame["layer"].tolist()
    assert used[:7] == [3, 4, 6, 7, 9, 10, 11]
    assert used[8:15] == used[:7]
    assert recording.layers[3].class_name == "linear"


def test_a_checkpointed_forward_that_runs_again_saves_activations_in_the_backward() -> None:
    made = Made()
    made.alloc(512, inside(("/job/model.py", 20, "forward")))
    again = [
        *inside(("/job/model.py", 20, "forward"))[:-2],
        (f"{SITE}utils/checkpoint.py", 1100, "unpack_hook"),
        *ENGINE[2:],
    ]
    first, second = made.alloc(3072, again), made.alloc(1536, again)
    made.free(second, again)
    made.alloc(6144, ENGINE)
    made.free(first, ENGINE)
    assert dict(categories(made.read())) | {512: ""} == {
        512: "", 3072: "activation", 1536: "temporary", 6144: "temporary"
    }  # fmt: skip


def test_what_frees_may_have_the_stack_of_what_it_frees() -> None:
    """Recorded with context="alloc". The forward's stack at a free in the backward begins no forward."""
    made = Made()
    stack = inside(("/job/model.py", 20, "forward"))
    saved = [made.alloc(1024, stack) for _ in range(3)]
    for at in saved:
        made.alloc(2048, ENGINE)
        made.free(at, [*MALLOC, *stack])
    runs = [phase for _, phase in phases(made.read())]
    assert runs.count("forward") == runs.count("backward") == 1


@pytest.mark.parametrize("native", [True, False], ids=["C++ and Python", "Python alone"])
def test_a_ring_that_lost_its_beginning_begins_within_its_first_step(native: bool) -> None:
    made = Made(native=native)
    made.before(4096)
    made.free(made.alloc(2048, ENGINE), ENGINE)
    made.free(made.alloc(2048, STEP), STEP)
    made.step([4096])
    recording = made.read()
    assert [step.step for step in recording.steps] == [1, 2]
    assert (1, "backward") in phases(recording)


def test_ranges_of_the_script_give_phases_and_steps_and_are_phases_of_their_own() -> None:
    made = Made(native=False)
    for name in (
        name for step in (6, 7) for name in (f"step {step}", "forward", "my part", "Optimizer.step#Mine.step")
    ):
        times = {"START": len(made.trace) + 1, "END": len(made.trace) + 4}  # it allocates and frees: three events
        made.ranges += [{"name": name, "stage": stage, "device": 0, "time_us": at} for stage, at in times.items()]
        made.free(made.alloc(2048, LOSS), LOSS)
    recording = made.read()
    assert [step.step for step in recording.steps] == [6, 7]
    assert {(6, "forward"), (6, "optimizer"), (7, "forward"), (7, "optimizer")} <= set(phases(recording))
    assert [(row.name, row.step) for row in recording.named_phases][:2] == [("forward", 6), ("my part", 6)]


def test_stacks_that_tell_nothing_leave_the_snapshot_as_it_is() -> None:
    made = Made(native=False)
    made.alloc(512, [])
    made.alloc(512, LOSS)
    read = made.read()
    assert (read.layers, read.scopes, read.steps) == ([], [], [])


@pytest.mark.parametrize(
    ("frames", "kind", "purpose", "operation"),
    [
        (LOSS, UNKNOWN, "", ""),
        ([], BLANK, "", ""),
        (MALLOC, BLANK, "", ""),
        (inside(("/job/model.py", 3, "forward")), FORWARD, "", ""),
        ([(f"{SITE}nn/functional.py", 3400, "cross_entropy"), *LOSS], UNKNOWN, "", "aten::cross_entropy"),
        (inside((f"{SITE}nn/modules/linear.py", 134, "forward")), FORWARD, "", "aten::linear"),
        ([ENGINE[1], (f"{SITE}nn/functional.py", 3400, "cross_entropy"), *LOSS], UNKNOWN, "", "aten::mm"),
        (ENGINE, BACKWARD, "", "MmBackward0"),
        (STEP, OPTIMIZER, "", ""),
        (ZERO, UNKNOWN, "", ""),
        ([(f"{SITE}nn/utils/clip_grad.py", 30, "clip_grad_norm_"), *LOSS], UNKNOWN, "", ""),
        ([(f"{SITE}autograd/__init__.py", 230, "_make_grads"), *LOSS], BACKWARD, "", ""),
        ([("/job/ops.py", 7, "backward"), (f"{SITE}autograd/function.py", 311, "apply")], BACKWARD, "", ""),
        ([*MALLOC, ("", 0, "at::cuda::getCUDABlasLtWorkspace()"), *ENGINE[2:]], BACKWARD, "workspace", "MmBackward0"),
        ([("ProcessGroupNCCL.cpp", 0, "c10d::ProcessGroupNCCL::allreduce()"), *LOSS], UNKNOWN, "communication", ""),
        (
            [("/v/torch/distributed/fsdp/_fully_shard/_fsdp_param.py", 1068, "alloc_all_gather_outputs"), *LOSS],
            UNKNOWN, "parameter", "",
        ),
    ],
)  # fmt: skip
def test_a_stack_tells_a_phase_and_a_purpose(frames: list[Frame], kind: int, purpose: str, operation: str) -> None:
    rows = [FrameRow(*frame) for frame in frames]
    (fact,) = read_evidence(rows, [range(len(rows))])
    assert (fact.kind, fact.purpose, fact.operation) == (kind, purpose, operation)


def test_blocks_of_a_backward_in_anomaly_mode_have_the_line_of_their_forward() -> None:
    made = Made()
    made.alloc(512, inside(("/job/model.py", 20, "forward")))
    made.alloc(1024, ENGINE)
    made.alloc(2048, ENGINE)
    places = (("train.py", 90), ("v/lib/python3.12/site-packages/torch/utils/checkpoint.py", 500), ("model.py", 20))
    texts = [f'  File "/{name}", line {line}, in forward\n' for name, line in places]
    texts.insert(1, "?")
    made.trace[1]["forward_frames"] = texts
    recording = made.read()
    frame = build_blocks(recording).frame
    lines = stack_lines(recording.frames, recording.stacks)
    assert [lines[stack] for stack in frame["stack"]] == [
        "/job/model.py:20 (forward)", "/model.py:20 (forward, backward)", ""
    ]  # fmt: skip
    assert frame["phase"].astype(str).tolist() == ["forward", "backward", "backward"]
    assert frame["operation"].tolist()[1:] == ["MmBackward0", "MmBackward0"]
    assert not frame["recompute"].any()


@pytest.mark.parametrize("forward", [7, ["x", 7], [{"filename": "x"}]])
def test_a_forwards_stack_that_torch_does_not_write_makes_the_file_no_snapshot(forward: object) -> None:
    made = Made()
    made.alloc(1024, ENGINE)
    made.trace[0]["forward_frames"] = forward
    with pytest.raises(NoSnapshotError, match="forward"):
        made.read()


def test_cells_of_a_notebook_have_numbers() -> None:
    made = Made(native=False)
    for file in ("/tmp/ipykernel_41/7731.py", "/tmp/ipykernel_41/2210.py", "<ipython-input-7-1a2b3c>"):
        made.alloc(512, inside((file, 3, "forward")))
    made.alloc(512, inside(("/tmp/ipykernel_41/7731.py", 4, "forward")))
    recording = made.read()
    lines = stack_lines(recording.frames, recording.stacks)
    assert [lines[stack] for stack in build_blocks(recording).frame["stack"]] == [
        "cell 1:3 (forward)", "cell 2:3 (forward)", "In [7]:3 (forward)", "cell 1:4 (forward)"
    ]  # fmt: skip


_MAIN, _AUTOGRAD = 7, 8
_RESERVED = 64 << 20


class Allocating(Written):
    """A trace whose operations allocate and free. ``before`` bytes were allocated before it began."""

    def __init__(self, before: int = 0) -> None:
        super().__init__()
        self.held, self.allocated, self._next = dict[int, int](), before, 1 << 20

    def change(self, at: int, bytes_: int, thread: int, **more: Any) -> None:
        self.allocated += bytes_
        facts = {"Device Type": 1, "Device Id": 0, "Addr": at, "Bytes": bytes_, "Total Allocated": self.allocated}
        facts["Total Reserved"] = _RESERVED
        self.events.append({**event("cpu_instant_event", "[memory]", self.now + 3, 0, **facts | more), "ph": "i"})
        self.events[-1]["tid"] = thread

    def alloc(self, size: int, operation: str = "aten::mm", thread: int = _MAIN, sequence: int = -1) -> int:
        """An operation that makes a block in aten::empty, which counts for it."""
        at, self._next = self._next, self._next + (1 << 20)
        self.held[at] = size
        for name, inside in ((operation, {"Sequence number": sequence} if sequence >= 0 else {}), ("aten::empty", {})):
            self.kernel(name, inside=inside)
            self.events[-3]["tid"], self.events[-2]["tid"] = thread, thread
            self.now -= 10
        self.change(at, size, thread)
        self.now += 10
        return at

    def free(self, at: int, thread: int = _MAIN) -> None:
        self.change(at, -self.held.pop(at), thread)
        self.now += 10

    def inside(self, category: str, name: str, begin: float, thread: int = _MAIN, **more: Any) -> None:
        self.events.append(event(category, name, begin - 0.5, self.now - begin, **more) | {"tid": thread})

    def step(self, number: int, *, zeroes: bool = True) -> None:
        """A linear layer's forward, its backward in a thread of its own, and an optimizer that makes states once."""
        begin = at = self.now
        saved = self.alloc(4096, "aten::addmm", sequence=number)
        self.inside("python_function", "nn.Module: Linear_0", at)
        self.inside("python_function", "model.py(12): forward", at - 0.2)
        self.inside("python_function", "train.py(3): main", begin - 0.4)
        at = self.now
        gradient = self.alloc(1024, "aten::mm", _AUTOGRAD)
        self.free(self.alloc(8192, "aten::mm", _AUTOGRAD), _AUTOGRAD)
        self.free(saved, _AUTOGRAD)
        name = "autograd::engine::evaluate_function: AddmmBackward0"
        self.inside("cpu_op", name, at, _AUTOGRAD, **{"Sequence number": number, "Fwd thread id": 1})
        at = self.now
        if number == 1:
            self.alloc(2048, "aten::zeros_like")
        self.free(self.alloc(512 * number, "aten::_foreach_sqrt"))
        self.inside("user_annotation", "Optimizer.step#AdamW.step", at)
        if zeroes:
            at = self.now
            self.free(gradient)
            self.inside("user_annotation", "Optimizer.zero_grad#AdamW.zero_grad", at)
        self.inside("user_annotation", f"ProfilerStep#{number}", begin)
        self.now += 5

    def open(self, folder: Path, step: int | None = None) -> Run:
        return open_imported(self.write(folder), StepChoice(step=step))


def at_peak(run: Run) -> dict[str, int]:
    return {name: bytes_ for name, bytes_ in run.summary.by_category.items() if bytes_}


def test_categories_layers_and_lines_at_the_peak_follow_from_the_ranges_around_each_request(tmp_path: Path) -> None:
    trace = Allocating(before=1 << 20)
    trace.step(1)
    trace.step(2)
    run = trace.open(tmp_path, 2)
    assert run.summary.peak_allocated_bytes == (1 << 20) + 2048 + 4096 + 1024 + 8192
    assert (run.summary.peak_step, run.summary.peak_phase) == (2, "backward")
    assert run.summary.peak_reserved_bytes == _RESERVED
    assert at_peak(run) == {
        "activation": 4096, "gradient": 1024, "temporary": 8192, "optimizer_state": 2048, "other": 1 << 20
    }  # fmt: skip
    assert run.memory is not None
    peak = run.memory.peak().sort_values("bytes").set_index("bytes")
    assert peak["operation"].to_dict() == {
        1024: "aten.mm", 2048: "aten.zeros_like", 4096: "aten.addmm", 8192: "aten.mm",
        1 << 20: "from before the history",
    }  # fmt: skip
    assert set(peak.loc[[1024, 4096, 8192], "layer"]) == {"Linear"}
    assert peak["line"].to_dict() == {
        1024: "model.py:12 (forward, backward)", 2048: "", 4096: "model.py:12 (forward)",
        8192: "model.py:12 (forward, backward)", 1 << 20: "",
    }  # fmt: skip
    assert next(line for line in held_lines(run) if line.label == "model.py:12 (forward)").bytes == 4096 + 1024 + 8192


def test_the_peak_is_that_of_the_step_that_is_shown(tmp_path: Path) -> None:
    """Step 1 makes the states, step 3 has the largest temporary."""
    trace = Allocating()
    for number in (1, 2, 3):
        if number == 2:
            trace.free(trace.alloc(1 << 22))  # between steps
        trace.step(number)
    peaks = {}
    for step in (1, 2, 3):
        run = trace.open(tmp_path, step)
        assert run.summary.timed is not None
        (said,) = [note.text for note in run.summary.timed[1].notes if note.code == "memory_traced"]
        assert f"13.00 KiB allocated and 64.00 MiB reserved in step {step};" in said or step > 1
        peaks[step] = run.summary.peak_allocated_bytes
        assert [row.step for row in run.summary.steps] == [step]
    held = 4096 + 1024 + 8192
    assert peaks == {1: held, 2: held + 2048, 3: held + 2048}


def test_blocks_from_before_the_trace_are_those_that_it_frees_and_a_rest(tmp_path: Path) -> None:
    trace = Allocating(before=10_240)
    trace.held[77 << 20] = 1024
    trace.step(1)
    trace.free(77 << 20)
    blocks = trace.open(tmp_path).table("blocks")
    assert blocks["bytes"].tolist()[:2] == [1024, 10_240 - 1024]
    assert blocks["operation"].tolist()[:2] == ["from before the history"] * 2


def test_without_steps_memory_counts_over_the_whole_file_and_its_phases_are_told(tmp_path: Path) -> None:
    trace = Allocating()
    trace.step(1)
    trace.events = [each for each in trace.events if not each["name"].startswith("ProfilerStep")]
    run = trace.open(tmp_path)
    phases = run.table("phases")
    assert list(zip(phases["step"], phases["phase"].astype(str), strict=True)) == [
        (1, "forward"), (1, "backward"), (1, "optimizer"), (1, "other")
    ]  # fmt: skip
    assert run.summary.peak_allocated_bytes == 4096 + 1024 + 8192


@pytest.mark.parametrize("facts", [{"Bytes": 1 << 60}, {"Total Allocated": -(1 << 61)}, {"Addr": "?"}])
def test_requests_of_impossible_sizes_are_left_out_and_counted(tmp_path: Path, facts: dict[str, Any]) -> None:
    trace = Allocating()
    trace.step(1)
    trace.change(1 << 30, 512, _MAIN, **facts)
    run = trace.open(tmp_path)
    assert run.summary.timed is not None
    is_counted = any(note.code == "events_not_read" for note in run.summary.timed[1].notes)
    assert is_counted == ("Addr" not in facts)
    assert run.summary.peak_allocated_bytes < 1 << 20


def test_a_trace_without_requests_has_no_memory(tmp_path: Path) -> None:
    trace = Written()
    trace.kernel("aten::mm")
    assert open_imported(trace.write(tmp_path)).memory is None
