"""Sparse tensors: gradients of embeddings, their optimizers, and products."""

from __future__ import annotations

from typing import Any

import torch
from cases import Rank, case, same
from torch import nn
from torch.nn import functional

POINTS = [[0, 1, 1, 2], [2, 0, 0, 1]]


def coordinates(rank: Rank, *, twice: bool = True) -> torch.Tensor:
    """A sparse 3 x 4 matrix; one place occurs twice."""
    values = torch.tensor([3.0, 4.0, 5.0, 6.0], device=rank.device)
    indices = torch.tensor(POINTS, device=rank.device)
    found = torch.sparse_coo_tensor(indices, values, (3, 4))
    return found if twice else found.coalesce()


def whole(rank: Rank) -> torch.Tensor:
    """The same as a dense matrix."""
    dense = torch.zeros(3, 4)
    dense[0, 2], dense[1, 0], dense[2, 1] = 3.0, 9.0, 6.0
    return dense.to(rank.device)


def embedding(rank: Rank, *, sparse: bool, **how: Any) -> nn.Embedding:
    torch.manual_seed(0)
    return nn.Embedding(10, 4, sparse=sparse, **how).to(rank.device)


@case("nn/test_embedding.py: test_embedding_sparse_basic", "a sparse gradient has the shape of the weight")
def gradient(rank: Rank) -> None:
    net = embedding(rank, sparse=True)
    net(torch.tensor([[0, 2, 4, 5], [4, 3, 0, 9]], device=rank.device)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.is_sparse
    assert net.weight.grad.shape == net.weight.shape


@case("nn/test_embedding.py: test_embedding_sparse_half", "a sparse gradient in half precision keeps its type")
def gradient_in_half(rank: Rank) -> None:
    net = embedding(rank, sparse=True).half()
    net(torch.tensor([0, 2, 2], device=rank.device)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.dtype == torch.half
    assert net.weight.grad.is_sparse


@case("nn/test_embedding.py: test_embedding_functional", "a sparse gradient is the dense one, rows of padding are zero")
def same_as_dense(rank: Rank) -> None:
    rows = torch.tensor([1, 3, 3, 7, 0], device=rank.device)
    grads = []
    for sparse in (True, False):
        net = embedding(rank, sparse=sparse, padding_idx=0)
        functional.embedding(rows, net.weight, padding_idx=0, sparse=sparse).square().sum().backward()
        assert net.weight.grad is not None
        grads.append(net.weight.grad.to_dense() if sparse else net.weight.grad)
    same(grads[0], grads[1])
    same(grads[0][0], 0)


@case("nn/test_embedding.py: test_embedding_bag_device", "a bag is a sum of rows, and its gradient has those rows")
def bag(rank: Rank) -> None:
    torch.manual_seed(0)
    net = nn.EmbeddingBag(10, 4, mode="sum", sparse=True).to(rank.device)
    rows = torch.tensor([1, 2, 4, 5, 4, 3], device=rank.device)
    out = net(rows, torch.tensor([0, 4], device=rank.device))
    same(out[0], net.weight[rows[:4]].sum(0))
    out.sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad._indices().tolist() == [rows.tolist()]
    assert net.weight.grad._values().shape == (6, 4)


@case("test_optim.py: test_rosenbrock_sparse (SGD)", "a step with sparse gradients is that with dense ones")
def sgd(rank: Rank) -> None:
    _same_steps(rank, lambda parameters: torch.optim.SGD(parameters, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1))


@case("test_optim.py: test_rosenbrock_sparse (Adagrad)", "a step with sparse gradients is that with dense ones")
def adagrad(rank: Rank) -> None:
    _same_steps(rank, lambda p: torch.optim.Adagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1))


@case("test_optim.py: test_rosenbrock_sparse (SparseAdam)", "its first step on all rows is Adam's")
def sparse_adam(rank: Rank) -> None:
    _same_steps(rank, lambda p: torch.optim.SparseAdam(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1), steps=1)


def _same_steps(rank: Rank, first: Any, second: Any, steps: int = 2) -> None:
    nets = [embedding(rank, sparse=sparse) for sparse in (True, False)]
    for net, make in zip(nets, (first, second), strict=True):
        optimizer = make(list(net.parameters()))
        for _ in range(steps):
            net(torch.arange(10, device=rank.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(nets[0].weight, nets[1].weight)


@case("test_sparse.py: test_coalesce", "values at one place add up, and places are in order")
def coalesced(rank: Rank) -> None:
    found = coordinates(rank).coalesce()
    assert found.is_coalesced()
    assert found._nnz() == 3
    same(found.values(), torch.tensor([3.0, 9.0, 6.0]))
    assert found.indices().tolist() == [[0, 1, 2], [2, 0, 1]]


@case("test_sparse.py: test_to_sparse", "to_sparse and to_dense undo each other")
def there_and_back(rank: Rank) -> None:
    dense = whole(rank)
    same(dense.to_sparse().to_dense(), dense)
    same(coordinates(rank).to_dense(), dense)


@case("test_sparse.py: test_sparse_mm", "a product with a dense matrix, and its gradients")
def product(rank: Rank) -> None:
    torch.manual_seed(0)
    right = torch.randn(4, 2).to(rank.device).requires_grad_()
    left = coordinates(rank, twice=False).requires_grad_()
    out = torch.sparse.mm(left, right)
    same(out, whole(rank) @ right)
    out.sum().backward()
    assert right.grad is not None
    same(right.grad, whole(rank).t() @ torch.ones(3, 2, device=rank.device))


@case("test_sparse.py: test_spadd", "a dense matrix plus a sparse one")
def added(rank: Rank) -> None:
    same(whole(rank) + coordinates(rank), whole(rank) * 2)


@case("test_sparse.py: test_sparse_sum", "sums over one axis and over both")
def summed(rank: Rank) -> None:
    matrix = coordinates(rank, twice=False)
    same(torch.sparse.sum(matrix), 18)
    same(torch.sparse.sum(matrix, 0).to_dense(), whole(rank).sum(0))


@case("test_sparse.py: test_softmax", "a softmax of the values that are there")
def softmax(rank: Rank) -> None:
    found = torch.sparse.softmax(coordinates(rank, twice=False), 1).coalesce()
    same(found.values(), 1)


@case("test_sparse_csr.py: test_sparse_csr_to_dense", "compressed rows hold the dense matrix")
def rows(rank: Rank) -> None:
    where = [torch.tensor(each, device=rank.device) for each in ([0, 1, 2, 3], [2, 0, 1])]
    found = torch.sparse_csr_tensor(*where, torch.tensor([3.0, 9.0, 6.0], device=rank.device), (3, 4))
    same(found.to_dense(), whole(rank))
    assert found._nnz() == 3


@case(
    "test_sparse_csr.py: test_csr_matvec", "compressed rows times a vector: the shape", "the values are not looked at"
)
def rows_times_vector(rank: Rank) -> None:
    found = whole(rank).to_sparse_csr() @ torch.ones(4, device=rank.device)
    assert found.shape == (3,)
    assert torch.isfinite(found.cpu()).all()
