"""Operations that read values on their way: none reads memory that no kernel wrote, and sizes agree with counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.support.virtual_worker import on_virtual_gpu

if TYPE_CHECKING:
    import torch

    from fakedist.gpu.values.engine import ValueEngine

_WIDTH = 16


def _inputs(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Floats [rows, 16], whole numbers [rows], a mask like the floats."""
    import torch

    torch.manual_seed(0)
    rows = 1 << 17 if kind == "large" else 48
    if kind == "defined":
        x, index = torch.randn(rows, _WIDTH, device="cuda"), torch.arange(rows, device="cuda") % 7
        return x, index, x > 0.3
    x = torch.empty(rows, _WIDTH, device="cuda")
    index = torch.empty(rows * (2 if kind == "large" else 1), dtype=torch.long, device="cuda")[:rows]
    return x, index, torch.empty(rows, _WIDTH, dtype=torch.bool, device="cuda")


def _counting(x: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Sizes that must equal a count: each gives both."""
    import torch

    few = mask[:, 0]
    return {
        "masked_select": lambda: (torch.masked_select(x, mask).numel(), mask.sum().item()),
        "index": lambda: (x[mask].numel(), mask.count_nonzero().item()),
        "index rows": lambda: (len(x[few]), int(few.sum())),
        "nonzero": lambda: (len(mask.nonzero()), int(mask.sum())),
        "nonzero tuple": lambda: (len(mask.nonzero(as_tuple=True)[0]), int(mask.sum())),
        "argwhere": lambda: (len(torch.argwhere(mask)), int(mask.sum())),
        "where": lambda: (len(torch.where(mask)[0]), int(mask.sum())),
        "repeat_interleave": lambda: (len(x.repeat_interleave(index, 0)), int(index.sum())),
        "repeats": lambda: (len(torch.repeat_interleave(index)), int(index.sum())),
        "one_hot": lambda: (torch.nn.functional.one_hot(index).shape[-1], int(index.max()) + 1),
        "bincount": lambda: (len(torch.bincount(index)), int(index.max()) + 1),
        "unique": lambda: (len(torch.unique(index)), len(torch.unique(index, return_inverse=True)[0])),
        "unique rows": lambda: (len(torch.unique(index[:, None], dim=0)), len(torch.unique(index))),
        "unique_consecutive": lambda: (
            len(torch.unique_consecutive(index)),
            len(torch.unique_consecutive(index, return_counts=True)[1]),
        ),
        "to_sparse": lambda: (x.to_sparse()._nnz(), len(x.nonzero())),
        "to_sparse_csr": lambda: (x.to_sparse_csr()._nnz(), len(x.nonzero())),
        "to host": lambda: (x.cpu().tolist() == x.tolist() or len(x) > 48, True),
        "to another type": lambda: (index.to(torch.int32).sum().item(), index.sum().item()),
        "contiguous": lambda: (index[::2].contiguous().sum().item(), index[::2].sum().item()),
        "reshape": lambda: (index.view(-1, 2).t().reshape(-1).sum().item(), index.sum().item()),
    }


def _losses_and_draws(x: torch.Tensor, index: torch.Tensor) -> dict[str, Callable[[], Any]]:
    import torch

    fun, few = torch.nn.functional, x[:32]
    ones, ends = torch.ones(2, 3, dtype=torch.long, device="cuda"), torch.tensor([0, 3, 8], device="cuda")
    logits = few.log_softmax(-1)[:, None].repeat(1, 2, 1)
    lengths = torch.tensor([32, 32], device="cuda"), torch.tensor([3, 2], device="cuda")
    segments = torch.tensor([len(x)], device="cuda")
    return {
        "histc": lambda: torch.histc(x),
        "histc range": lambda: torch.histc(x, 10, -1, 1),
        "segment_reduce": lambda: torch.segment_reduce(x, "sum", lengths=segments),
        "multinomial": lambda: torch.multinomial(x.softmax(-1), 3),
        "multinomial again": lambda: torch.multinomial(x.softmax(-1), 30, replacement=True),
        "bernoulli": lambda: torch.bernoulli(x.sigmoid()),
        "isin": lambda: torch.isin(index, index[:3]),
        "bucketize": lambda: torch.bucketize(x, torch.arange(3.0, device="cuda")),
        "cdist": lambda: torch.cdist(few, few + 1),
        "combinations": lambda: torch.combinations(index[:12]),
        "cov": lambda: torch.cov(few),
        "corrcoef": lambda: torch.corrcoef(few),
        "trapezoid": lambda: torch.trapezoid(x),
        "take_along_dim": lambda: torch.take_along_dim(x, index[:, None] % _WIDTH, 1),
        "embedding renormed": lambda: fun.embedding(index, x.clone(), max_norm=1.0),
        "embedding_bag": lambda: fun.embedding_bag(index, x.clone(), ends[:2], max_norm=1.0, scale_grad_by_freq=True),
        "ctc_loss": lambda: fun.ctc_loss(logits, ones, *lengths),
        "ctc_loss host": lambda: fun.ctc_loss(logits, ones, lengths[0].cpu(), lengths[1].cpu()),
        "cross_entropy": lambda: fun.cross_entropy(
            x, index % _WIDTH, weight=torch.ones(_WIDTH, device="cuda"), ignore_index=3, label_smoothing=0.1
        ),
        "gaussian_nll": lambda: fun.gaussian_nll_loss(x, x + 1, torch.ones_like(x)),
    }


def _others(x: torch.Tensor, index: torch.Tensor, mask: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Operations whose kernels or composites read values: they run, and give what they gave before."""
    import torch

    rows, places = len(x), torch.stack([index, index % _WIDTH])
    first = torch.ones(1, 8, dtype=torch.bool, device="cuda")
    ends = torch.tensor([0, 3, 8], device="cuda")
    return {
        **_losses_and_draws(x, index),
        "sparse": lambda: torch.sparse_coo_tensor(places, x[:, 0], (rows, _WIDTH), check_invariants=True),
        "sparse inferred": lambda: torch.sparse_coo_tensor(places, x[:, 0]),
        "coalesce": lambda: torch.sparse_coo_tensor(places, x[:, 0], (rows, _WIDTH)).coalesce(),
        "sparse sum": lambda: torch.sparse.sum(torch.sparse_coo_tensor(places, x[:, 0], (rows, _WIDTH))),
        "assert_async": lambda: torch._assert_async(torch.isfinite(x).all()),
        "is_all_true": lambda: bool(torch._is_all_true(torch.isfinite(x))),
        "is_any_true": lambda: bool(torch._is_any_true(torch.isnan(x))),
        "matrix_exp": lambda: torch.matrix_exp(x[:16]),
        "quantile": lambda: x.quantile(torch.tensor([0.1, 0.9], device="cuda"), dim=1),
        "nanmean": lambda: x.nanmean(),
        "nanmedian": lambda: x.nanmedian(),
        "mode": lambda: x.mode(1).values,
        "kthvalue": lambda: x.kthvalue(3, 1).values,
        "cummax": lambda: x.cummax(0).values,
        "count_nonzero": lambda: x.count_nonzero(0),
        "nonzero_static": lambda: torch.nonzero_static(mask, size=5),
        "pad_sequence": lambda: torch.nn.utils.rnn.pad_sequence([x[:2], x[:3]]),
        "pack_padded_sequence": lambda: torch.nn.utils.rnn.pack_padded_sequence(x[:8, None], torch.tensor([8])).data,
        "nested": lambda: torch.nested.nested_tensor([x[:2], x[:3]]).to_padded_tensor(0.0),
        "nested from mask": lambda: torch._nested_tensor_from_mask(x[None, :8], first).to_padded_tensor(0.0),
        "jagged": lambda: torch.nested.nested_tensor_from_jagged(x[:8], ends).to_padded_tensor(0.0),
        "linspace": lambda: torch.linspace(x[0, 0], x[0, 1], 5),
        "categorical": lambda: torch.distributions.Categorical(logits=x).sample(),
        "normal": lambda: torch.distributions.Normal(x, x.abs() + 0.1).log_prob(x),
        "nonfinite norm": lambda: torch.nn.utils.get_total_norm([x], error_if_nonfinite=True),
        "istft": lambda: torch.istft(
            torch.stft(x.flatten()[:256], 32, return_complex=True), 32, window=torch.ones(32, device="cuda")
        ),
        "grouped_mm": lambda: torch._grouped_mm(
            x.bfloat16(),
            torch.ones(2, _WIDTH, _WIDTH, dtype=torch.bfloat16, device="cuda"),
            offs=torch.tensor([4, rows], dtype=torch.int32, device="cuda"),
        ),
    }


def _shape(result: Any) -> Any:
    import torch

    if not isinstance(result, torch.Tensor):
        return result
    return tuple(result.shape) if result.layout == torch.strided else (str(result.layout), tuple(result.shape))


def _check(*, inference: bool) -> None:
    import torch

    failed = []
    with torch.inference_mode() if inference else contextlib.nullcontext():
        for kind in ("defined", "undefined", "large"):
            for name in _counting(*_inputs("defined")):
                size, count = _counting(*_inputs(kind))[name]()
                if size != count:
                    failed.append(f"{kind} {name}: {size} of {count}")
            for name in _others(*_inputs("defined")):
                try:
                    first, second = (_shape(_others(*_inputs(kind))[name]()) for _ in range(2))
                except Exception as error:
                    failed.append(f"{kind} {name}: {type(error).__name__} {str(error)[:100]}")
                    continue
                if first != second and kind == "defined":
                    failed.append(f"{kind} {name}: {first}, then {second}")
    assert not failed, "\n".join(failed)


@on_virtual_gpu
def test_operations_that_read_values_run_and_their_sizes_agree_with_counts(engine: ValueEngine) -> None:
    _check(inference=False)


@on_virtual_gpu
def test_in_inference_mode_operations_that_are_made_of_others_agree_too(engine: ValueEngine) -> None:
    _check(inference=True)


@on_virtual_gpu
def test_a_gradient_of_masked_scatter_has_the_size_of_its_source(engine: ValueEngine) -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        source = torch.ones(152, device="cuda", dtype=dtype, requires_grad=True)
        mask = torch.arange(228, device="cuda").view(2, 114) % 3 != 0
        target = torch.zeros(2, 114, device="cuda", dtype=dtype)
        target.masked_scatter(mask, source).sum().backward()
        assert source.grad is not None
        assert source.grad.tolist() == [1] * 152
        longer = torch.ones(200, device="cuda", dtype=dtype, requires_grad=True)
        target.masked_scatter(mask, longer).sum().backward()
        assert longer.grad is not None
        assert longer.grad.tolist() == [1] * 152 + [0] * 48
    large = torch.zeros(64, 1024, 1024, device="cuda")
    mask = torch.zeros(64, 1024, 1, dtype=torch.bool, device="cuda")
    mask[:, :10] = True
    unknown = torch.empty(64, 1024, 1024, dtype=torch.bool, device="cuda")
    for chosen in (mask.expand_as(large), unknown):
        source = torch.randn(640, 1024, device="cuda", requires_grad=True)
        large.masked_scatter(chosen, source).sum().backward()
        assert source.grad is not None
        assert source.grad.shape == (640, 1024)


@on_virtual_gpu
def test_what_composites_compute_of_known_values_is_right(engine: ValueEngine) -> None:
    import torch

    for mode in (contextlib.nullcontext(), torch.inference_mode()):
        with mode:
            x = torch.tensor([[0.0, 2.0], [3.0, 0.0]], device="cuda")
            assert x.to_sparse()._indices().tolist() == [[0, 1], [1, 0]]
            twice = torch.sparse_coo_tensor(torch.tensor([[1, 0, 1]], device="cuda"), x.flatten()[1:], (2,)).coalesce()
            assert twice.indices().tolist() == [[0, 1]]
            assert twice.values().tolist() == [3, 2]
            assert torch.histc(x, 3).tolist() == [2, 0, 2]
            assert torch.segment_reduce(x, "sum", lengths=torch.tensor([2], device="cuda")).tolist() == [[3, 2]]
            assert x.to("cpu").tolist() == x.double().tolist() == x.t().contiguous().t().tolist()
            assert torch.arange(4).to("cuda").tolist() == [0, 1, 2, 3]
            assert torch.linspace(x[0, 0], x[0, 1], 3).tolist() == [0, 1, 2]
    assert engine.invented() == []
