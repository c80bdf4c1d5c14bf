"""Every operator of torch on small known values: the virtual GPU gives what the CPU gives, or says that it made it up.

The samples are those of torch's own tests (``op_db``). Each runs forward, backward, in place and with ``out``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.virtual_worker import invented_values, on_virtual_gpu

if TYPE_CHECKING:
    import torch

    from fakedist.gpu.values.engine import ValueEngine

_WERE_MADE_UP = "were made up"
#: The most samples of an operator that run.
_MOST_SAMPLES = 8
#: Operators with random results, or memory that holds nothing.
_RANDOM: tuple[str, ...] = (
    "empty",
    "new_empty",
    "resize",
    "bernoulli",
    "multinomial",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
)
_RANDOM += ("normal", "log_normal", "rand", "nn.functional.dropout", "nn.functional.alpha_dropout", "svd_lowrank")
_RANDOM += ("nn.functional.feature_alpha_dropout", "nn.functional.fractional_max_pool", "nn.functional.rrelu")
_RANDOM += ("nn.functional.multi_head_attention_forward", "pca_lowrank")
#: Operators that the CPU or the GPU alone has, or whose samples mix both devices.
_OTHER_KERNELS = ("sparse.mm", "narrow_copy", "to_sparse", "tensor_split", "torch.ops.aten._scaled_dot_product_flash")
#: Operators whose results are made up although their operands are known: the GPU's operator has no kernel on the CPU.
_MADE_UP: tuple[str, ...] = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "grid_sampler_3d",
    "histc",
    "sparse.sampled_addmm",  # with a sparse out, whose parts the library writes
    "bmm_triton_optimized",  # no kernel of Triton's is computed
    "linalg.eig",  # the status that cuSOLVER writes is read; the result is computed
    "linalg.eigvals",
)
_MADE_UP += tuple(
    f"nn.functional.{name}"
    for name in (
        *("batch_norm", "conv_transpose3d", "embedding_bag", "instance_norm", "logsigmoid"),
        *("multilabel_soft_margin_loss", "pad", "rms_norm", "scaled_dot_product_attention"),
    )
)


def _is_same_on_both(sample: Any) -> bool:
    """Whether the GPU has the sample's algorithm, and neither device draws numbers for it."""
    return not sample.kwargs.get("dropout_p") and sample.kwargs.get("driver") in (None, "gels")


def _samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    with_gradient = bool(info.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=with_gradient))
    samples = [sample for sample in samples if _is_same_on_both(sample)]
    yield from samples[:: max(len(samples) // _MOST_SAMPLES, 1)][:_MOST_SAMPLES]


def _on(device: str, values: Any) -> Any:
    """Copies of a sample's arguments on a device."""
    import torch
    from torch.utils._pytree import tree_map

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copy = value.detach().clone() if device == "cpu" else value.detach().to(device)
            return copy.requires_grad_(value.requires_grad)
        if value in ("cpu", torch.device("cpu")) and isinstance(value, (str, torch.device)):
            return device
        return value

    return tree_map(copied, values)


def _tensors(values: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _ways(info: Any, sample: Any) -> dict[str, Callable[[str], Any]]:
    """The ways to run a sample on a device; each returns results."""
    import torch

    def forward(device: str) -> Any:
        torch.manual_seed(0)
        first, args, kwargs = _on(device, (sample.input, sample.args, sample.kwargs))
        return info(first, *args, **kwargs)

    def backward(device: str) -> Any:
        torch.manual_seed(0)
        first, args, kwargs = _on(device, (sample.input, sample.args, sample.kwargs))
        results = [result for result in _tensors(info(first, *args, **kwargs)) if result.requires_grad]
        loss = sum((result * result.detach().conj()).real.sum() + result.real.sum() for result in results)
        leaves = [leaf for leaf in _tensors((first, args, kwargs)) if leaf.requires_grad]
        return torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]

    def in_place(device: str) -> Any:
        torch.manual_seed(0)
        first, args, kwargs = _on(device, (sample.input, sample.args, sample.kwargs))
        with torch.no_grad():
            return info.inplace_variant(first, *args, **kwargs)

    def out(device: str) -> Any:
        torch.manual_seed(0)
        first, args, kwargs = _on(device, (sample.input, sample.args, sample.kwargs))
        with torch.no_grad():
            expected = forward("cpu")
            given = torch.full_like(expected.detach(), 1, device=device)
            return info(first, *args, **kwargs, out=given)

    ways: dict[str, Callable[[str], Any]] = {"forward": forward}
    if any(tensor.requires_grad for tensor in _tensors((sample.input, sample.args, sample.kwargs))):
        ways["backward"] = backward
    if info.inplace_variant is not None and not sample.broadcasts_input:
        ways["in place"] = in_place
    if info.supports_out:
        ways["out"] = out
    return ways


def _results(run: Callable[[str], Any], device: str) -> list[torch.Tensor]:
    """The results on the host, without layouts that cannot be compared. A derivative that is zero has no memory."""
    import torch

    results = []
    for result in _tensors(run(device)):
        dense = torch.zeros_like(result, device="cpu") if result._is_zerotensor() else result.detach().cpu()
        dense = dense if dense.layout is torch.strided else dense.to_dense()
        results.append(dense.float() if dense.dtype.itemsize == 1 and dense.is_floating_point() else dense)
    return results


def _verdict(engine: ValueEngine, run: Callable[[str], Any]) -> str:
    """The difference of the virtual GPU's results from the CPU's; empty if there is none."""
    import torch

    try:
        expected = _results(run, "cpu")
    except Exception:
        return ""  # a way that this sample does not allow
    invented_values(engine)
    try:
        found = _results(run, "cuda")
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    if made_up := invented_values(engine):
        return f"{made_up} values {_WERE_MADE_UP}"
    for mine, theirs in zip(found, expected, strict=True):
        try:
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, equal_nan=True, check_stride=False)
        except AssertionError as error:
            return f"other values: {str(error).splitlines()[0][:90]}"
    return ""


def _differences(engine: ValueEngine, infos: Sequence[Any]) -> Iterator[str]:
    import torch

    for info in infos:
        if info.name.startswith((*_RANDOM, *_OTHER_KERNELS)):
            continue
        dtypes = [
            dtype
            for dtype in (torch.float32, torch.int64)
            if {"cpu", "cuda"} <= {kind for kind in ("cpu", "cuda") if info.supports_dtype(dtype, kind)}
        ]
        for dtype in dtypes or sorted(info.dtypesIfCUDA, key=str)[:1]:
            seen: set[str] = set()
            for sample in _samples(info, dtype):
                for way, run in _ways(info, sample).items():
                    verdict = "" if way in seen else _verdict(engine, run)
                    is_listed = info.name in _MADE_UP or info.formatted_name in _MADE_UP
                    if verdict and not (verdict.endswith(_WERE_MADE_UP) and is_listed):
                        seen.add(way)
                        yield f"{info.formatted_name} {str(dtype)[6:]} {way}: {verdict}"


def _operators() -> list[Any]:
    """torch's own list. Its module's import needs a package that only compares text in torch's tests."""
    import sys
    import unittest
    from types import ModuleType

    with contextlib.ExitStack() as undo:
        if "expecttest" not in sys.modules:
            stand_in: Any = ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase
            sys.modules["expecttest"] = stand_in
            undo.callback(sys.modules.pop, "expecttest")
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@on_virtual_gpu
def test_small_known_values_give_what_the_cpu_gives(engine: ValueEngine) -> None:
    differences = list(_differences(engine, _operators()))
    assert not differences, "\n".join(differences)
