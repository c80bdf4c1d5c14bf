"""Quantized tensors, and training that quantizes."""

from __future__ import annotations

import torch
from cases import Rank, case, raises, same
from torch import nn
from torch.ao import quantization

TENSORS = "quantization/core/test_quantized_tensor.py: "
OPS = "quantization/core/test_workflow_ops.py: "


def numbers(rank: Rank) -> torch.Tensor:
    return torch.tensor([[-1.0, 0.26, 0.5], [2.0, -0.24, 30.0]], device=rank.device)


@case(TENSORS + "test_qtensor", "whole numbers, scale and zero point, and the values again")
def tensor(rank: Rank) -> None:
    found = torch.quantize_per_tensor(numbers(rank), 0.1, 2, torch.qint8)
    assert (found.q_scale(), found.q_zero_point(), found.dtype) == (0.1, 2, torch.qint8)
    same(found.int_repr().float(), torch.tensor([[-8.0, 5, 7], [22, 0, 127]]))
    same(found.dequantize(), torch.tensor([[-1.0, 0.3, 0.5], [2.0, -0.2, 12.5]]))


@case(TENSORS + "test_qtensor_view", "a view and a part of a quantized tensor")
def view(rank: Rank) -> None:
    found = torch.quantize_per_tensor(numbers(rank), 0.1, 0, torch.quint8)
    same(found.view(-1)[1:3].dequantize(), torch.tensor([0.3, 0.5]))
    assert found.reshape(3, 2).q_scale() == 0.1


@case(TENSORS + "test_clone", "a copy has the same values")
def clone(rank: Rank) -> None:
    found = torch.quantize_per_tensor(numbers(rank), 0.1, 0, torch.qint32)
    same(found.clone().dequantize(), found.dequantize())


@case(TENSORS + "test_per_tensor_to_device", "to the host with its scale and its values")
def to_host(rank: Rank) -> None:
    found = torch.quantize_per_tensor(numbers(rank), 0.1, 0, torch.qint8).cpu()
    assert (found.device.type, found.q_scale()) == ("cpu", 0.1)
    same(found.dequantize()[0], torch.tensor([-1.0, 0.3, 0.5]))


@case(TENSORS + "test_per_channel_qtensor_creation", "scales and zero points of each row, and the values again")
def rows(rank: Rank) -> None:
    scales = torch.tensor([0.1, 0.5], dtype=torch.double, device=rank.device)
    zeros = torch.tensor([0, 2], device=rank.device)
    found = torch.quantize_per_channel(numbers(rank), scales, zeros, 0, torch.qint8)
    assert found.q_per_channel_axis() == 0
    same(found.q_per_channel_scales(), scales)
    same(found.dequantize(), torch.tensor([[-1.0, 0.3, 0.5], [2.0, 0.0, 30.0]]))


@case(OPS + "test_forward_per_tensor", "quantize and dequantize in one step")
def fake(rank: Rank) -> None:
    found = torch.fake_quantize_per_tensor_affine(numbers(rank), 0.1, 0, -128, 127)
    same(found, torch.quantize_per_tensor(numbers(rank), 0.1, 0, torch.qint8).dequantize())


@case(OPS + "test_backward_per_tensor", "the gradient passes where nothing was cut off")
def fake_backward(rank: Rank) -> None:
    given = numbers(rank).requires_grad_()
    torch.fake_quantize_per_tensor_affine(given, 0.1, 0, -128, 127).sum().backward()
    assert given.grad is not None
    same(given.grad, torch.tensor([[1.0, 1, 1], [1, 1, 0]]))


@case(OPS + "test_forward_per_tensor (tensor_qparams)", "scale and zero point in tensors")
def fake_with_tensors(rank: Rank) -> None:
    scale, zero = torch.tensor([0.1], device=rank.device), torch.tensor([0], dtype=torch.int32, device=rank.device)
    same(
        torch.fake_quantize_per_tensor_affine(numbers(rank), scale, zero, -128, 127),
        torch.fake_quantize_per_tensor_affine(numbers(rank), 0.1, 0, -128, 127),
    )


@case(OPS + "test_forward_per_channel", "one scale for each row")
def fake_rows(rank: Rank) -> None:
    scales = torch.tensor([0.1, 0.5], device=rank.device)
    zeros = torch.tensor([0, 2], dtype=torch.int32, device=rank.device)
    found = torch.fake_quantize_per_channel_affine(numbers(rank), scales, zeros, 0, -128, 127)
    same(found, torch.tensor([[-1.0, 0.3, 0.5], [2.0, 0.0, 30.0]]))


@case("quantization/core/test_workflow_module.py: test_per_tensor_observers", "an observer keeps the extremes")
def observer(rank: Rank) -> None:
    watching = quantization.MinMaxObserver(dtype=torch.quint8).to(rank.device)
    watching(numbers(rank))
    assert (float(watching.min_val), float(watching.max_val)) == (-1.0, 30.0)
    scale, _ = watching.calculate_qparams()
    same(scale, 31.0 / 255)


@case("quantization/core/test_workflow_module.py: test_fused_obs_fake_quant_moving_avg", "an observer that quantizes")
def fused_observer(rank: Rank) -> None:
    net = quantization.FusedMovingAvgObsFakeQuantize().to(rank.device)
    out = net(numbers(rank).requires_grad_())
    assert out.shape == (2, 3)
    out.sum().backward()


@case(
    "quantization/eager/test_quantize_eager_qat.py: test_manual",
    "a prepared model trains, step after step",
    "the values are not looked at",
)
def aware_training(rank: Rank) -> None:
    net = nn.Sequential(quantization.QuantStub(), nn.Linear(4, 4), nn.ReLU(), quantization.DeQuantStub())
    net.train()
    net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    prepared = quantization.prepare_qat(net).to(rank.device)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(3):
        prepared(rank.full(1, 2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.isfinite().all() for parameter in prepared.parameters())


@case(TENSORS + "test_qtensor_dtypes", "a type that cannot be quantized is refused")
def wrong_type(rank: Rank) -> None:
    raises(lambda: torch.quantize_per_tensor(numbers(rank), 0.1, 0, torch.float16), "dtype", "ScalarType", "qint")
