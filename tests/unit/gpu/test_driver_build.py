"""Which functions of the installed libraries the virtual GPU's driver answers, and which it leaves to them."""

from __future__ import annotations

import re

import pytest

from fakedist.gpu.driver.build import answered_names, is_harmless


@pytest.mark.parametrize(
    "name",
    [
        "cudnnCreateTensorDescriptor",
        "cudnnSetTensorNdDescriptor",
        "cudnnGetFilterNdDescriptor",
        "cudnnSetConvolutionGroupCount",
        "cudnnSetSpatialTransformerNdDescriptor",
        "cudnnGetVersion",
        "cudnnGetProperty",
        "cudnnGetLastErrorString",
        "cublasGetStatusString",
    ],
)
def test_what_needs_no_gpu_is_left_to_the_library(name: str) -> None:
    assert is_harmless(name)
    assert name not in answered_names()


@pytest.mark.parametrize(
    "name",
    [
        "cudnnCreate",
        "cudnnSetDropoutDescriptor",  # fills states on the GPU
        "cudnnSetRNNDescriptor_v8",  # keeps a dropout descriptor, which is ours
        "cudnnBackendCreateDescriptor",
        "cudnnGetConvolutionForwardWorkspaceSize",
        "cudnnSetStream",
        "cublasSetStream_v2",
    ],
)
def test_what_takes_a_handle_is_not(name: str) -> None:
    assert not is_harmless(name)


def test_a_descriptor_is_made_and_destroyed_by_the_same_side() -> None:
    answered = answered_names()
    made = {match[1] for name in answered if (match := re.fullmatch(r"cudnnCreate(\w*Descriptor)", name))}
    destroyed = {match[1] for name in answered if (match := re.fullmatch(r"cudnnDestroy(\w*Descriptor)", name))}
    assert made == destroyed == {f"{kind}Descriptor" for kind in ("CTCLoss", "Dropout", "RNN", "RNNData")}
