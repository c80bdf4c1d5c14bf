import pytest

from fakedist.analysis.traces import step_trace as names
from fakedist.analysis.traces.step_trace import meaning, without_numbers


@pytest.mark.parametrize(
    ("text", "kind", "name", "phase", "number"),
    [
        ("fakedist.step:4", names.STEP, "", "", 4),
        ("fakedist.phase:optimizer", names.PHASE, "", "optimizer", -1),
        ("fakedist.layer:layers.0.attention", names.LAYER, "layers.0.attention", "", -1),
        ("fakedist.call:17", names.CALL, "", "", 17),
        ("fakedist.timed", names.IGNORED, "", "", -1),
        ("step 3", names.STEP, "", "", 3),
        ("iteration12", names.STEP, "", "", 12),
        ("ProfilerStep#7", names.STEP, "", "", 7),
        ("train_step_5", names.STEP, "", "", 5),
        ("iter 3/100", names.STEP, "", "", 3),
        ("forward", names.PHASE, "", "forward", -1),
        ("backward pass", names.PHASE, "", "backward", -1),
        ("bwd", names.PHASE, "", "backward", -1),
        ("forward_step_func", names.PHASE, "", "forward", -1),
        ("optimizer.step", names.PHASE, "", "optimizer", -1),
        ("Optimizer.step#AdamW.step", names.PHASE, "", "optimizer", -1),
        ("forward-backward", names.IGNORED, "", "", -1),
        ("aten::mm", names.OPERATION, "aten::mm", "", -1),
        ("fakedist::all_gather", names.OPERATION, "fakedist::all_gather", "", -1),
        ("nccl:all_reduce", names.OPERATION, "nccl:all_reduce", "", -1),
        ("MmBackward0", names.DERIVATIVE, "MmBackward0", "backward", -1),
        ("autograd::engine::evaluate_function: MmBackward0", names.NODE, "MmBackward0", "backward", -1),
        ("TransformerLayer.self_attention", names.LAYER, "TransformerLayer.self_attention", "", -1),
        ("LayerNormLinear.backward", names.LAYER, "LayerNormLinear.backward", "backward", -1),
        ("layer 3", names.LAYER, "layer 3", "", -1),
        (" ", names.IGNORED, "", "", -1),
    ],
)
def test_a_ranges_text_is_understood(text: str, kind: int, name: str, phase: str, number: int) -> None:
    found = meaning(text)
    assert (found.kind, found.name, found.phase, found.number) == (kind, name, phase, number)


def test_what_a_library_pushes_is_no_layer() -> None:
    assert meaning("ncclAllReduce", "NCCL").kind == names.OPERATION
    assert meaning("mlp", "my own domain").kind == names.LAYER


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("aten::mm, seq = 12, op_id = 7, sizes = [[1, 2]]", ("aten::mm", 12)),
        ("aten::mm, op_id = 7", ("aten::mm", -1)),
        ("aten::view, sizes = [[2, 3]]", ("aten::view", -1)),
        ("mlp, the second", ("mlp, the second", -1)),
        ("plain", ("plain", -1)),
    ],
)
def test_what_makes_each_text_different_is_cut_off(text: str, cut: tuple[str, int]) -> None:
    assert without_numbers(text) == cut
