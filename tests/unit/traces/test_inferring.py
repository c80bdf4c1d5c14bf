"""Phases, steps, layers and categories of snapshots, from stacks like those that torch 2.11 writes.

The snapshots are made here, event by event, in the form of ``torch.cuda.memory._snapshot()``.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from fakedist.analysis.blocks import build_blocks, event_places
from fakedist.analysis.recording import Recording
from fakedist.analysis.stack_lines import stack_lines
from fakedist.rundir.rows import FrameRow
from fakedist.traces.snapshot_reading import NoSnapshotError, read_foreign
from fakedist.traces.stack_evidence import BACKWARD, BLANK, FORWARD, OPTIMIZER, UNKNOWN, read_evidence

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
