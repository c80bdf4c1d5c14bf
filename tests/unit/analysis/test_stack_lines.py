"""The lines of stacks, and those of a forward for what its backward allocates."""

from array import array

import numpy as np
import pytest

from fakedist.analysis.recording import Recording
from fakedist.analysis.stack_lines import BACKWARD, forward_line, forward_of, in_engine, script_lines, stack_lines
from fakedist.rundir.rows import FrameRow
from tests.unit.analysis.recorded import MIB, HandMade

LINEAR = ("/site-packages/torch/nn/modules/linear.py", 134, "forward")
APPLY = ("/site-packages/torch/autograd/function.py", 460, "apply")
LLAMA = ("/site-packages/transformers/models/llama.py", 7, "forward")
MODEL, MAIN = ("/job/model.py", 12, "forward"), ("/job/train.py", 3, "main")
RUNS_ENGINE = ("/site-packages/torch/autograd/graph.py", 869, "_engine_run_backward")
CALLS_BACKWARD = ("/job/train.py", 9, "main")
GENERATED = (f"/tmp/inductor/c{'a' * 51}.py", 40, "call")
CALLS = ("/site-packages/torch/_ops.py", 916, "__call__")
UNFINISHED = ("/site-packages/torch/distributed/_functional_collectives.py", 1284, "__torch_dispatch__")
COMPILER = ("/site-packages/torch/_inductor/output_code.py", 830, "__call__")

Frame = tuple[str, int, str]


def packed(code: str, *values: int) -> bytes:
    return array(code, values).tobytes()


def nodes(made: HandMade, *rows: tuple[int, int, int, int]) -> None:
    """Say which operation or stack made a node: (op, thread, sequence, stack)."""
    op, thread, sequence, stack = zip(*rows, strict=True)
    columns = {"op": packed("q", *op), "thread": packed("Q", *thread), "sequence": packed("q", *sequence)}
    made.record("nodes", frames=[], stacks=[], **columns, stack=packed("i", *stack))


def ran(made: HandMade, op: int, thread: int, sequence: int) -> None:
    made.record("node_runs", op=packed("q", op), thread=packed("Q", thread), sequence=packed("q", sequence))


def lines_of_blocks(recording: Recording) -> list[str]:
    lines = [*stack_lines(recording.frames, recording.stacks), ""]
    return [lines[stack] for stack in recording.device_events["stack"][1:]]


def of_backward(made: HandMade, *own: Frame) -> tuple[str, list[Frame]]:
    """Line and frames of a block that a node allocates with this stack; the forward's is LINEAR, MODEL, MAIN."""
    forward = made.op("forward")
    made.alloc(0, MIB, stack=made.stack(LINEAR, MODEL, MAIN))
    backward = made.op("backward")
    made.alloc(MIB, MIB, stack=made.stack(*own))
    nodes(made, (forward, 1, 5, -1))
    ran(made, backward, 1, 5)
    recording = made.read()
    stack = recording.stacks[int(recording.device_events["stack"][-1])]
    return lines_of_blocks(recording)[-1], [tuple(recording.frames[frame]) for frame in stack]


def test_a_double_backward_has_the_line_of_the_forward_that_began_it(made: HandMade) -> None:
    """Forces are gradients of energies: the first backward, without lines, makes the nodes of the second."""
    forward = made.op("forward")
    made.alloc(0, MIB, stack=made.stack(LINEAR, MODEL, MAIN))
    first, second = made.op("backward"), made.op("backward")
    made.alloc(MIB, MIB, stack=made.stack(), op=first)
    made.alloc(2 * MIB, MIB, stack=made.stack(), op=second)
    nodes(made, (forward, 1, 5, -1), (first, 2, 3, -1))
    ran(made, first, 1, 5)
    ran(made, second, 2, 3)
    assert lines_of_blocks(made.read())[1:] == ["/job/model.py:12 (forward, backward)"] * 2


def test_a_block_without_a_stack_has_the_line_of_the_forward_of_its_node(made: HandMade) -> None:
    line, frames = of_backward(made)
    assert line == "/job/model.py:12 (forward, backward)"
    assert frames == [BACKWARD, LINEAR, MODEL, MAIN]


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ([LINEAR, APPLY], "/job/model.py:12 (forward, backward)"),  # an autograd function of torch's
        ([LLAMA, APPLY], "/site-packages/transformers/models/llama.py:7 (forward)"),
        ([("/job/model.py", 30, "backward"), APPLY], "/job/model.py:30 (backward)"),  # the script's
        ([("/job/model.py", 40, "hook")], "/job/model.py:40 (hook)"),
        ([("/site-packages/torch/distributed/fsdp.py", 8, "pre_backward")], ""),  # a hook of torch's
        ([CALLS, UNFINISHED], "/job/model.py:12 (forward, backward)"),  # the gradient is a collective's result
        ([CALLS, UNFINISHED, ("/site-packages/torch/distributed/fsdp.py", 8, "pre_backward")], ""),
        ([RUNS_ENGINE, CALLS_BACKWARD], "/job/model.py:12 (forward, backward)"),  # in the thread that called backward
        ([LINEAR, APPLY, RUNS_ENGINE, CALLS_BACKWARD], "/job/model.py:12 (forward, backward)"),
        ([GENERATED, ("/job/model.py", 11, "mlp"), COMPILER, APPLY], "/job/model.py:11 (mlp, backward)"),
    ],
)
def test_a_stack_in_a_backward(made: HandMade, own: list[Frame], wanted: str) -> None:
    assert of_backward(made, *own)[0] == wanted


def test_lines_of_a_compiled_graph_are_below_the_backward(made: HandMade) -> None:
    inner = ("/job/model.py", 11, "mlp")
    _, frames = of_backward(made, GENERATED, inner, COMPILER, APPLY)
    assert frames == [GENERATED, COMPILER, APPLY, BACKWARD, inner, LINEAR, MODEL, MAIN]


def test_nodes_are_known_by_thread_and_number_and_the_first_row_holds(made: HandMade) -> None:
    stacks = [made.stack(("/job/model.py", line, "forward")) for line in (1, 2, 3)]
    forward = made.op("forward")
    nodes(made, (-1, 1, 5, stacks[0]), (-1, 2, 5, stacks[1]), (-1, 1, 5, stacks[2]), (forward, 1, 6, -1))
    for thread, sequence in ((1, 5), (2, 5), (1, 6), (3, 5)):
        ran(made, made.op("backward"), thread, sequence)
        made.alloc(0, MIB)
        made.free(0, MIB)
    lines = [line for line in lines_of_blocks(made.read()) if line]
    assert lines == ["/job/model.py:1 (forward, backward)", "/job/model.py:2 (forward, backward)"]


def test_the_scripts_line_is_below_those_of_libraries(made: HandMade) -> None:
    made.stack(LINEAR, LLAMA, MAIN)
    made.stack(
        ("/root/Megatron-LM/megatron/core/mlp.py", 5, "forward"), ("/root/Megatron-LM/pretrain_gpt.py", 9, "run")
    )
    made.stack(LLAMA)
    made.stack(MODEL, ("/usr/lib/python3.11/runpy.py", 88, "_run_code"))
    made.op()
    made.alloc(0, MIB)
    recording = made.read()
    assert script_lines(recording.frames, recording.stacks) == [
        "/job/train.py:3 (main)",
        "/root/Megatron-LM/pretrain_gpt.py:9 (run)",
        "",
        "/job/model.py:12 (forward)",
    ]


def test_the_forwards_line_of_any_line() -> None:
    assert forward_line("/job/model.py:12 (forward, backward)") == "/job/model.py:12 (forward)"
    assert forward_line("/job/model.py:12 (backward)") == "/job/model.py:12 (backward)"


def test_nodes_that_a_backward_made_by_functions_alone_belong_to_the_node_that_ran_before() -> None:
    made = {"op": np.array([4, 7, -1]), "thread": np.array([1, 1, 2]), "sequence": np.array([5, 6, 0])}
    ran = {"op": np.array([10, 11, 12]), "thread": np.array([1, 1, 2]), "sequence": np.array([6, 5, 0])}
    in_backward = np.arange(13) >= 10
    assert forward_of(made, ran, in_backward)["forward"].tolist() == [7, 4, 4]
    made["op"][1] = 10  # an operation that the backward repeats made a node in the function
    assert forward_of(made, ran, in_backward)["forward"].tolist() == [10, 4, 10]


def test_frames_of_c_and_cpp_are_no_lines() -> None:
    """Torch's default stacks begin with them, and have the interpreter's between those of Python."""
    native = [
        ("??", 0, "torch::unwind::unwind()"),
        ("", 0, "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)"),
        ("RegisterCUDA_0.cpp", 0, "at::(anonymous namespace)::wrapper_CUDA_index_Tensor()"),
        ("/pytorch/aten/src/ATen/native/cuda/Loops.cuh", 12, "at::native::gpu_kernel()"),  # with debug symbols
        ("/usr/local/src/Python/ceval.c", 5381, "_PyEval_EvalFrameDefault"),
        ("/usr/lib/libc.so.6", 0, "__libc_start_main"),
        ("/usr/bin/python3.12", 1858359, "_PyEval_EvalFrameDefault"),  # an offset in the file
        ("/opt/conda/bin/python", 4224, "_start"),
    ]
    frames = [FrameRow(*frame) for frame in (*native, LINEAR, MODEL)]
    stack = (*range(len(native)), 8, 3, 4, 9)
    assert stack_lines(frames, [stack, stack[:8]]) == ["/job/model.py:12 (forward)", ""]
    assert script_lines(frames, [stack, stack[:8]]) == ["/job/model.py:12 (forward)", ""]


def test_autograds_engine_is_found_in_stacks_of_cpp() -> None:
    frames = [
        FrameRow("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"),
        FrameRow("??", 0, "torch::autograd::VariableType::mul(at::Tensor const&)"),
    ]
    assert in_engine(frames, [(1, 0), (1,), ()]) == [True, False, False]
