"""Transformer Engine on the virtual GPU: its own kernels, fp8 in all its scalings, bytes that follow from shapes.

Runs where Transformer Engine is installed; ``tests/clients/build_transformer_engine.sh`` builds it from PyPI.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pandas
import pytest

from tests.conftest import RunFakedist

pytestmark = pytest.mark.skipif(
    not any(importlib.metadata.distributions(name="transformer_engine_torch")),
    reason="Transformer Engine is not installed: tests/clients/build_transformer_engine.sh builds it from PyPI",
)
JOB = Path(__file__).parent / "jobs/transformer_engine_features.py"

# As in the job: rows, columns of the linear layer's weight, of its input; the layer norm has two vectors.
TOKENS, HIDDEN, OUT, EXPERTS, TOP_K, TENSOR = 4096, 2048, 6144, 8, 2, 8
HEADS, KEYS, INNER = 16, 512, 8192
NORM = 2 * HIDDEN
STATISTICS = 2 * 4  # a row's mean and deviation, float32
DELAYED_HISTORY = 1024 * 5 * 4 + 5 * 4  # amax of 3 forward and 2 backward tensors, and their scales
SCALINGS = {"h100-80g": ["bf16", "delayed", "current", "blockwise"], "b200": ["bf16", "delayed", "current", "mxfp8"]}
CASES = [(gpu, scaling) for gpu, scalings in SCALINGS.items() for scaling in scalings]
FP8_CASES = [(gpu, scaling) for gpu, scaling in CASES if scaling != "bf16"]
NVFP4 = ("b200", "nvfp4")
KINDS = ("linear", "tensor_parallel", "grouped", "layer", "fp8_weights")


@pytest.fixture(scope="module")
def found(run_fakedist: RunFakedist, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, int]]:
    """Memory and kernels of every feature, by GPU and feature. One run a GPU; it ends well and nothing is refused."""
    features = {}
    for gpu, scalings in SCALINGS.items():
        names = [
            f"{kind}_{scaling}" for kind in KINDS for scaling in scalings if (kind, scaling) != (KINDS[-1], "bf16")
        ]
        names += ["permutation_index", "permutation_mask", "overlap", "router"]
        names += ["attention_packed", "attention_dropout", "attention_fp8"]
        if gpu == "b200":
            names += ["linear_nvfp4", "fp8_weights_nvfp4"]
        directory = tmp_path_factory.mktemp(gpu)
        options = ["--device", "virtual", "--gpu", gpu, "--world-size", "64", "--rank", "0", "--steps", "1000"]
        finished = run_fakedist("profile", *options, "--output", "run", JOB, *names, cwd=directory)
        assert finished.code == 0, finished.stderr
        assert pandas.read_parquet(directory / "run/tables/unanswered.parquet").empty
        for line in finished.stdout.splitlines():
            if line.startswith("FEATURE "):
                feature = json.loads(line.removeprefix("FEATURE "))
                features[gpu, feature.pop("name")] = feature
        assert {name for where, name in features if where == gpu} == set(names)
    return features


def quantized(gpu: str, scaling: str, rows: int, columns: int, weight: bool) -> tuple[int, int]:
    """Bytes of an fp8 matrix as it is multiplied forward, and of its form for backward; scales are counted.

    Before Blackwell, fp8 products with one scale a tensor need a transpose for backward; since then one serves both.
    """
    size = rows * columns
    if scaling == "mxfp8":
        return size + size // 32, size + size // 32
    if scaling == "nvfp4":
        return size // 2 + size // 16 + 4, size // 2 + size // 16 + 4
    if scaling == "blockwise" and weight:  # squares of 128, rows of scales padded to 4
        blocks = rows // 128, columns // 128
        scales = [4 * (high * (-(-wide // 4) * 4)) for high, wide in (blocks, blocks[::-1])]
        return size + scales[0], size + scales[1]
    if scaling == "blockwise":
        return size + size // 128 * 4, size + size // 128 * 4
    return size + 4, size if gpu == "h100-80g" or not weight else 0


def held_for_backward(gpu: str, scaling: str, rows: int, columns: int, out: int) -> int:
    """Bytes between forward and backward of a layer norm of rows x columns and a linear layer with ``out`` outputs.

    In fp8 the input is kept in the form for backward alone, and the weight in both: they are made anew in each step.
    """
    if scaling == "bf16":
        return 2 * rows * columns
    scale = 4 if scaling in ("delayed", "current") else 0
    return quantized(gpu, scaling, rows, columns, False)[1] + scale + sum(quantized(gpu, scaling, out, columns, True))


@pytest.mark.parametrize(("gpu", "scaling"), [*CASES, NVFP4])
def test_a_linear_layer_holds_what_its_shapes_say(
    found: dict[tuple[str, str], dict[str, int]], gpu: str, scaling: str
) -> None:
    case = found[gpu, f"linear_{scaling}"]
    parameters = OUT * HIDDEN + NORM
    assert case["weights"] == 2 * parameters
    assert case["states"] == 8 * parameters
    output = 2 * TOKENS * OUT
    assert case["held"] == output + STATISTICS * TOKENS + held_for_backward(gpu, scaling, TOKENS, HIDDEN, OUT)


@pytest.mark.parametrize(("gpu", "sms", "blocks"), [("h100-80g", 132, 4), ("b200", 148, 5)])
def test_a_kernel_that_is_compiled_in_the_run_works_in_as_much_memory_as_its_registers_allow(
    found: dict[tuple[str, str], dict[str, int]], gpu: str, sms: int, blocks: int
) -> None:
    """The peak is in the layer norm's backward, whose partial sums take a row for each block that fits the GPU.

    By threads 16 blocks of 128 would fit an SM; the compiled kernel's registers leave room for so many.
    """
    case = found[gpu, "linear_bf16"]
    gradients = 2 * TOKENS * OUT + 2 * OUT * HIDDEN + 2 * TOKENS * HIDDEN + 2 * NORM
    normalized_freed = input_gradient = 2 * TOKENS * HIDDEN
    partial_sums = sms * blocks * NORM * 4
    assert case["peak"] == case["held"] + gradients - normalized_freed + input_gradient + partial_sums


@pytest.mark.parametrize(("gpu", "scaling"), CASES)
def test_a_tensor_parallel_layer_holds_its_shard(
    found: dict[tuple[str, str], dict[str, int]], gpu: str, scaling: str
) -> None:
    case = found[gpu, f"tensor_parallel_{scaling}"]
    rows, out = TOKENS // TENSOR, OUT // TENSOR
    assert case["weights"] == 2 * (out * HIDDEN + NORM)
    assert case["held"] == 2 * TOKENS * out + STATISTICS * rows + held_for_backward(gpu, scaling, rows, HIDDEN, out)


@pytest.mark.parametrize("gpu", list(SCALINGS))
def test_communication_that_overlaps_products_has_buffers_outside_of_torch(
    found: dict[tuple[str, str], dict[str, int]], gpu: str
) -> None:
    case, plain = found[gpu, "overlap"], found[gpu, "tensor_parallel_bf16"]
    assert all(case[what] == plain[what] for what in ("weights", "held", "states"))
    buffers = 12 * 2 * TOKENS * HIDDEN  # in qkv, proj, fc1, fc2: forward, gradient of the input, gradient of the weight
    assert 0 <= case["buffers"] - buffers < 16 << 20  # with flags and tables of addresses


@pytest.mark.parametrize(("gpu", "scaling"), [*FP8_CASES, NVFP4])
def test_fp8_weights_take_a_byte_for_each_form_and_have_masters(
    found: dict[tuple[str, str], dict[str, int]], gpu: str, scaling: str
) -> None:
    case = found[gpu, f"fp8_weights_{scaling}"]
    history = DELAYED_HISTORY if scaling == "delayed" else 0
    assert case["weights"] == sum(quantized(gpu, scaling, OUT, HIDDEN, True)) + 2 * NORM + history
    assert case["states"] == 12 * (OUT * HIDDEN + NORM)
    kept = quantized(gpu, scaling, TOKENS, HIDDEN, False)[1] + (4 if scaling in ("delayed", "current") else 0)
    assert case["held"] == 2 * TOKENS * OUT + STATISTICS * TOKENS + kept


@pytest.mark.parametrize(("gpu", "scaling"), CASES)
def test_grouped_linear_layers_hold_every_experts_weights(
    found: dict[tuple[str, str], dict[str, int]], gpu: str, scaling: str
) -> None:
    case = found[gpu, f"grouped_{scaling}"]
    assert case["weights"] == 2 * EXPERTS * OUT * HIDDEN
    assert case["states"] == 8 * EXPERTS * OUT * HIDDEN
    held = 2 * TOKENS * OUT
    if scaling != "bf16":  # bf16 keeps its input as it came
        held += EXPERTS * held_for_backward(gpu, scaling, TOKENS // EXPERTS, HIDDEN, OUT)
    if scaling in ("blockwise", "mxfp8"):
        held += 256  # the experts' inputs are cut from one buffer, aligned by hand
    assert case["held"] == held


@pytest.mark.parametrize(("gpu", "scaling"), CASES)
def test_a_transformer_layer_holds_what_its_parts_do(
    found: dict[tuple[str, str], dict[str, int]], gpu: str, scaling: str
) -> None:
    """RMSNorm, grouped-query attention through cuDNN, SwiGLU: everything between forward and backward, to the byte."""
    case = found[gpu, f"layer_{scaling}"]
    weights = [(HIDDEN + 2 * KEYS, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    parameters = sum(rows * columns for rows, columns in weights) + 2 * HIDDEN
    assert case["weights"] == 2 * parameters
    assert case["states"] == 8 * parameters
    held = 2 * TOKENS * (HIDDEN + 2 * KEYS + 2 * INNER)  # queries, keys and values; what SwiGLU starts from
    held += 3 * 2 * TOKENS * HIDDEN  # what attention gives, the residual after it, the output
    held += 2 * 4 * TOKENS + 4 * TOKENS * HEADS + 16  # two norms, the softmax, the state of the dropout generator
    if scaling == "bf16":
        held += 2 * TOKENS * (2 * HIDDEN + INNER)  # both normalized inputs, what SwiGLU gives
    else:
        held += sum(sum(quantized(gpu, scaling, rows, columns, True)) for rows, columns in weights)
        # Into the attention's and out of it, in the form for backward; the MLP keeps its inputs in both forms.
        held += 2 * kept(gpu, scaling, HIDDEN, both=False) + kept(gpu, scaling, HIDDEN, both=True)
        held += kept(gpu, scaling, INNER, both=scaling in ("blockwise", "mxfp8"))
    assert case["held"] == held


def kept(gpu: str, scaling: str, columns: int, both: bool) -> int:
    """Bytes of an input of TOKENS rows that is kept quantized, in the form for backward or in both."""
    forward, backward = quantized(gpu, scaling, TOKENS, columns, False)
    if scaling in ("blockwise", "mxfp8"):
        return backward + (forward if both else 0)
    return backward + 4 + (TOKENS * columns if both and gpu == "h100-80g" else 0)


@pytest.mark.parametrize("gpu", list(SCALINGS))
def test_attention_holds_its_output_and_the_softmax_of_each_row(
    found: dict[tuple[str, str], dict[str, int]], gpu: str
) -> None:
    output, softmax, dropout_state = 2 * TOKENS * HIDDEN, 4 * TOKENS * HEADS, 16
    for kind in ("packed", "dropout"):
        assert found[gpu, f"attention_{kind}"]["held"] == output + softmax + dropout_state
    in_fp8 = TOKENS * (HIDDEN + 2 * KEYS) + TOKENS * HIDDEN  # queries, keys, values; the output once more
    history = 15 * (1024 * 4 + 4)  # 9 tensors forward, 6 backward
    assert 0 <= found[gpu, "attention_fp8"]["held"] - (output + in_fp8 + softmax + history) < 64  # scales of one number


@pytest.mark.parametrize("gpu", list(SCALINGS))
def test_the_fused_router_gives_every_token_its_experts(found: dict[tuple[str, str], dict[str, int]], gpu: str) -> None:
    """Its kernel is not run and not seen by the dispatcher: zeros would leave the experts without tokens."""
    assert found[gpu, "router"] == {"routed": TOKENS * TOP_K, "most": TOKENS * TOP_K // EXPERTS}


@pytest.mark.parametrize("gpu", list(SCALINGS))
def test_tokens_are_permuted_with_their_row_map(found: dict[tuple[str, str], dict[str, int]], gpu: str) -> None:
    permuted = 2 * TOKENS * TOP_K * HIDDEN
    by_index, by_mask = found[gpu, "permutation_index"], found[gpu, "permutation_mask"]
    assert by_index["permuted"] == by_mask["permuted"] == permuted
    assert by_mask["held"] == permuted + 4 * TOKENS * (2 * EXPERTS + 1)
    assert permuted + 4 * TOKENS * TOP_K <= by_index["held"] < permuted + (1 << 20)  # with what the sort works in
