"""Attention: measured forwards and backwards, and the kinds of kernels against each other."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fakedist.cost_model.kernels.attention import AttentionKernel, AttentionRoof, AttentionShapes, AttentionTimes
from fakedist.cost_model.kernels.measurements import Floats, load_measured
from fakedist.cost_model.kernels.rules import _measured_times
from fakedist.gpu.models.catalogue import GPUS

PEAK, BANDWIDTH = GPUS["h200"].peak_flops["bf16"], GPUS["h200"].memory_bandwidth


@pytest.fixture(scope="module")
def times() -> AttentionTimes:
    measured = load_measured("h200-sxm")
    roof = AttentionRoof(PEAK, BANDWIDTH)
    return AttentionTimes(measured.attention, measured.training_attention, roof, training_peak_flops=PEAK)


def shape(
    tokens: int,
    *,
    heads: int = 64,
    causal: bool = True,
    batch: int = 1,
    width: int = 128,
    window: int = 0,
    in_blocks: bool = False,
) -> AttentionShapes:
    sizes = (batch, heads, 8, tokens, tokens, width, width)
    columns = [np.array([size]) for size in sizes]
    flags = {"causal": np.array([causal]), "in_blocks": np.array([in_blocks])}
    return AttentionShapes(*columns, window=np.array([window]), **flags)


# cudnn-frontend's table, H200, llama3.1, bfloat16: milliseconds of forward and backward.
@pytest.mark.parametrize(
    ("tokens", "causal", "forward", "backward"),
    [
        (8192, True, 1.708, 5.083),
        (8192, False, 3.182, 9.262),
        (32768, True, 25.566, 75.688),
        (2048, True, 0.142, 0.464),
    ],
)
def test_cudnn_takes_what_was_published(
    times: AttentionTimes, tokens: int, causal: bool, forward: float, backward: float
) -> None:
    assert times.forward_us(shape(tokens, causal=causal), "cudnn") == pytest.approx(forward * 1e3, rel=0.01)
    assert times.backward_us(shape(tokens, causal=causal), "cudnn") == pytest.approx(backward * 1e3, rel=0.01)


def test_flash_attention_2_is_as_much_slower_as_the_paper_says(times: AttentionTimes) -> None:
    slower = times.forward_us(shape(16384), "flash2") / times.forward_us(shape(16384), "cudnn")
    assert slower == pytest.approx(0.601 / 0.374)


def test_few_heads_do_not_fill_the_gpu_and_a_batch_counts_as_more(times: AttentionTimes) -> None:
    eight, sixty_four = (times.forward_us(shape(2048, heads=heads), "cudnn")[0] for heads in (8, 64))
    assert sixty_four / 8 < eight < sixty_four
    for kernel in ("cudnn", "inference"):
        one, two = (times.forward_us(shape(4096, batch=batch), kernel)[0] for batch in (1, 2))
        assert 1.8 < two / one < 2.1


def test_a_backward_without_measurements_follows_the_forward() -> None:
    measured = load_measured("a100-sxm")
    spec = GPUS["a100-80g"]
    roof = AttentionRoof(spec.peak_flops["bf16"], spec.memory_bandwidth)
    times = AttentionTimes(measured.attention, measured.training_attention, roof)
    forward, backward = times.forward_us(shape(4096), "flash2"), times.backward_us(shape(4096), "flash2")
    assert backward / forward == pytest.approx(2.5 * 0.73 / 0.63)


def test_flops_follow_from_the_mask_and_the_number_of_products() -> None:
    assert shape(4096).flops() / shape(4096, causal=False).flops() == pytest.approx(4097 / 8192)
    assert shape(4096).flops("backward") / shape(4096).flops() == pytest.approx(2.5)
    four = AttentionShapes(
        *(np.array([size]) for size in (1, 1, 1, 4, 2, 8, 8)),
        causal=np.array([True]),
        window=np.array([0]),
        in_blocks=np.array([False]),
    )
    assert four.met_keys() == pytest.approx([(1 + 2 + 2 + 2) / 4])


# The same table, GPT-OSS: two sequences, heads of 64, a window of 1,024. No other kernel of that width was measured.
@pytest.mark.parametrize(("tokens", "forward", "backward"), [(8192, 0.738, 2.149), (32768, 3.021, 9.045)])
def test_a_window_of_narrow_heads_is_within_a_fifth_of_what_was_published(
    times: AttentionTimes, tokens: int, forward: float, backward: float
) -> None:
    windowed = shape(tokens, batch=2, width=64, window=1024)
    assert times.forward_us(windowed, "cudnn") == pytest.approx(forward * 1e3, rel=0.2)
    assert times.backward_us(windowed, "cudnn") == pytest.approx(backward * 1e3, rel=0.2)


@pytest.mark.parametrize("kernel", ["cudnn", "flash2", "flex", "efficient", "inference"])
def test_a_mask_and_a_window_never_cost_more(times: AttentionTimes, kernel: AttentionKernel) -> None:
    for tokens in (2048, 8192, 32768):
        full, causal = (times.forward_us(shape(tokens, causal=causal), kernel)[0] for causal in (False, True))
        assert causal <= full
        assert times.forward_us(shape(tokens, window=1024), kernel)[0] <= 1.02 * causal


def test_blocks_of_keys_cost_what_they_hold(times: AttentionTimes) -> None:
    """flex_attention visits whole blocks, so that no tile of them is cut, and as many keys take as long as one."""
    long = times.forward_us(shape(8192, causal=False), "flex")[0]
    blocks = [times.forward_us(shape(8192, causal=False, window=n, in_blocks=True), "flex")[0] for n in (512, 2048)]
    assert long / 16 < blocks[0] < 1.6 * long / 16
    assert long / 4 < blocks[1] < 1.3 * long / 4
    cut = times.forward_us(shape(8192, causal=False, window=512), "flex")[0]
    assert blocks[0] < cut


KERNELS: tuple[AttentionKernel, ...] = ("cudnn", "flash2", "flex", "efficient")
#: GPU models, and where their attention was measured.
GENERATIONS = {"a100-80g": "a100-sxm", "h100-80g": "h100-sxm", "h200": "h200-sxm", "b200": "b200-sxm", "l40s": "l40s"}


def limits(gpu: str) -> AttentionRoof:
    return AttentionRoof(GPUS[gpu].peak_flops["bf16"], GPUS[gpu].memory_bandwidth)


@pytest.mark.parametrize("gpu", GENERATIONS)
def test_no_attention_is_below_its_roofline_and_no_backward_is_shorter_than_its_forward(gpu: str) -> None:
    times, roof = _measured_times(GENERATIONS[gpu]), limits(gpu)
    for kernel, (batch, heads, width) in itertools.product(
        KERNELS, ((1, 1, 64), (4, 8, 64), (1, 16, 128), (16, 16, 128))
    ):
        before = (0.0, 0.0)
        for tokens in (16, 128, 256, 512, 768, 1024, 2048, 4096):
            one = shape(tokens, batch=batch, heads=heads, width=width)
            forward, backward = (
                float(us[0]) for us in (times.forward_us(one, kernel, roof), times.backward_us(one, kernel, roof))
            )
            for us, direction, bytes_ in ((forward, "forward", 1.0), (backward, "backward", 2.0)):
                assert us > one.flops(direction)[0] / roof.peak_flops * 1e6  # type: ignore[arg-type]
                assert us > bytes_ * one.moved_bytes()[0] / roof.memory_bandwidth * 1e6
            assert forward < backward < 8 * forward
            assert before[0] < forward
            assert before[1] < backward
            before = forward, backward


# arXiv:2407.08608, head width 128, no mask: FLOP/s at 512 and 1,024 tokens over those at 2,048.
@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [
        ("cudnn", (0.502 / 0.624, 0.580 / 0.624), (0.308 / 0.470, 0.412 / 0.470)),
        ("flash2", (0.312 / 0.366, 0.354 / 0.366), (0.216 / 0.294, 0.263 / 0.294)),
    ],
)
def test_short_sequences_slow_down_as_the_paper_says(
    times: AttentionTimes, kernel: AttentionKernel, forward: tuple[float, float], backward: tuple[float, float]
) -> None:
    def rates(price: Callable[[AttentionShapes, AttentionKernel], Floats], tokens: int) -> float:
        one = shape(tokens, heads=1024, causal=False)
        return float((one.flops() / price(one, kernel))[0])

    for price, expected in ((times.forward_us, forward), (times.backward_us, backward)):
        found = [rates(price, tokens) / rates(price, 2048) for tokens in (512, 1024)]
        assert found == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("tokens", [64, 128, 256, 512, 1024, 2048, 8192])
@pytest.mark.parametrize(("batch", "heads", "width"), [(4, 8, 64), (4, 32, 128), (1, 16, 128), (64, 32, 128)])
def test_an_a100_takes_one_to_four_times_as_long_as_an_h100(tokens: int, batch: int, heads: int, width: int) -> None:
    """Their peaks differ by 3.2 and their bandwidths by 1.6. FlashAttention-2 reaches less of an H100's peak."""
    one, gpus = shape(tokens, batch=batch, heads=heads, width=width), ("a100-80g", "h100-80g")
    prices = [(_measured_times(GENERATIONS[gpu]), limits(gpu)) for gpu in gpus]
    forward = [times.forward_us(one, "flash2", roof)[0] for times, roof in prices]
    backward = [times.backward_us(one, "flash2", roof)[0] for times, roof in prices]
    assert 1 <= forward[0] / forward[1] < 4
    assert 1 <= backward[0] / backward[1] < 4


def test_arithmetic_of_another_type_is_slower_and_the_start_is_not(times: AttentionTimes) -> None:
    """In fp32 an H200 has a fifteenth of the peak, and twice the bytes to move."""
    for tokens, heads, least, most in ((16, 1, 1.0, 1.1), (16384, 64, 14.9, 15.1)):
        half = shape(tokens, heads=heads)
        single = replace(half, slowdown=15.0, element_bytes=4.0)
        for price in (times.forward_us, times.backward_us):
            assert least <= price(single, "efficient")[0] / price(half, "efficient")[0] <= most
