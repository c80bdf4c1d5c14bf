"""Every function of torch.linalg, products with sparse matrices, and training with optimizers that factorise.

The optimizers are small ones of the kinds that are public as SOAP, Shampoo and GaLore, without their schedules. At the
end, a layer is quantised as by GPTQ. What failed goes to the file that is named first, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

L = torch.linalg
WIDTH, LARGE, STEPS = 512, 600, 3
Named = Iterator[tuple[str, Callable[[], object]]]


def decompositions(a: torch.Tensor, tall: torch.Tensor, positive: torch.Tensor) -> Named:
    """Each function that factorises: of a square, a tall and a positive definite matrix, or batches of them."""
    yield "svd", lambda: L.svd(a)
    for driver in ("gesvd", "gesvdj", "gesvda"):
        yield f"svd by {driver}", lambda driver=driver: L.svd(tall, full_matrices=False, driver=driver)
    yield "svdvals", lambda: L.svdvals(tall)
    yield "eigh", lambda: L.eigh(positive)
    yield "eigvalsh", lambda: L.eigvalsh(positive)
    yield "eig", lambda: L.eig(a)
    yield "eigvals", lambda: L.eigvals(a)
    yield "cholesky", lambda: L.cholesky(positive)
    yield "lu", lambda: L.lu(a)
    yield "lu_factor", lambda: L.lu_factor(a)
    yield "ldl_factor", lambda: L.ldl_factor(positive)
    yield "qr", lambda: L.qr(tall)
    yield "complete qr", lambda: L.qr(tall, mode="complete")
    yield "householder_product", lambda: L.householder_product(*torch.geqrf(tall))
    yield "ormqr", lambda: torch.ormqr(*torch.geqrf(a), tall)


def solutions(a: torch.Tensor, tall: torch.Tensor, positive: torch.Tensor) -> Named:
    """Each function that solves or measures."""
    yield "inv", lambda: L.inv(a)
    yield "solve", lambda: L.solve(a, tall)
    yield "lu_solve", lambda: L.lu_solve(*L.lu_factor(a), tall)
    yield "ldl_solve", lambda: L.ldl_solve(*L.ldl_factor(positive), tall)
    yield "cholesky_solve", lambda: torch.cholesky_solve(tall, positive)
    yield "cholesky_inverse", lambda: torch.cholesky_inverse(positive)
    yield "solve_triangular", lambda: L.solve_triangular(a, tall, upper=True)
    yield "lstsq", lambda: L.lstsq(a, tall)
    yield "tall lstsq", lambda: L.lstsq(tall, a)
    yield "pinv", lambda: L.pinv(tall)
    yield "Hermitian pinv", lambda: L.pinv(positive, hermitian=True)
    yield "matrix_exp", lambda: L.matrix_exp(a)
    yield "matrix_power", lambda: L.matrix_power(a, -2)
    yield "matrix_rank", lambda: L.matrix_rank(a)
    yield "matrix_norm", lambda: L.matrix_norm(a, 2)
    yield "cond", lambda: L.cond(a)
    yield "det", lambda: L.det(a)
    yield "slogdet", lambda: L.slogdet(a)


def sparse_products(coo: torch.Tensor, csr: torch.Tensor, dense: torch.Tensor) -> Named:
    """Products with sparse matrices, backward too, and what sorts their places."""

    def backward() -> None:
        sparse, other = coo.detach().requires_grad_(), dense.clone().requires_grad_()
        torch.sparse.mm(sparse, other).sum().backward()

    yield "coo @ dense", lambda: torch.sparse.mm(coo, dense)
    yield "coo @ vector", lambda: coo @ dense[:, 0]
    yield "coo backward", backward
    yield "csr @ dense", lambda: csr @ dense
    yield "csr @ vector", lambda: csr @ dense[:, 0]
    yield "sampled_addmm", lambda: torch.sparse.sampled_addmm(csr, dense, dense.t())
    yield "triangular", lambda: torch.triangular_solve(dense, csr, upper=True)
    yield "triangular vector", lambda: torch.triangular_solve(dense[:, :1], csr, upper=True)
    yield "sparse addmm", lambda: torch.sparse.addmm(dense, coo, dense)


def every_function() -> Named:
    """All of them, on matrices of several sizes and types."""
    for shape, dtype in (((LARGE,), torch.float32), ((2, 300), torch.float64), ((40, 16), torch.complex64)):
        n = shape[-1]
        a = torch.randn(*shape, n, device="cuda", dtype=dtype)
        tall = torch.randn(*shape, n // 2, device="cuda", dtype=dtype)
        positive = a @ a.mH + n * torch.eye(n, device="cuda", dtype=dtype)
        for kind in (decompositions, solutions):
            for name, function in kind(a, tall, positive):
                yield f"{name} of {(*shape, n)}", function
    places = torch.randint(0, LARGE, (2, 50 * LARGE)).cuda()
    coo = torch.sparse_coo_tensor(places, torch.randn(50 * LARGE, device="cuda"), (LARGE, LARGE)).coalesce()
    rows = torch.arange(LARGE + 1, device="cuda") * 50
    csr = torch.sparse_csr_tensor(rows, places[1], torch.randn(50 * LARGE, device="cuda"), (LARGE, LARGE))
    yield from sparse_products(coo, csr, torch.randn(LARGE, 64, device="cuda"))


class Factorising(torch.optim.Optimizer):
    """Steps by a function of a matrix's gradient and its own state."""

    def __init__(self, parameters: Iterator[nn.Parameter], direction: Callable[..., torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.direction = direction

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p.grad, self.state[p]), alpha=-group["lr"])


def soap(grad: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Adam in the basis of the gradient's covariances, which QR refines after the first step."""
    if not state:
        state["left"], state["right"] = grad @ grad.T, grad.T @ grad
        state["q_left"], state["q_right"] = L.eigh(state["left"])[1], L.eigh(state["right"])[1]
        state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
    state["left"].lerp_(grad @ grad.T, 0.05)
    state["right"].lerp_(grad.T @ grad, 0.05)
    projected = state["q_left"].T @ grad @ state["q_right"]
    state["mean"].lerp_(projected, 0.1)
    state["square"].lerp_(projected.square(), 0.05)
    update = state["q_left"] @ (state["mean"] / (state["square"].sqrt() + 1e-8)) @ state["q_right"].T
    state["q_left"] = L.qr(state["left"] @ state["q_left"])[0]
    state["q_right"] = L.qr(state["right"] @ state["q_right"])[0]
    return update


def shampoo(grad: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient between inverse fourth roots of its covariances."""

    def root(covariance: torch.Tensor) -> torch.Tensor:
        values, vectors = L.eigh(covariance)
        return vectors @ (values.clamp_min(1e-6).pow(-0.25).unsqueeze(-1) * vectors.T)

    for name, covariance in (("left", grad @ grad.T), ("right", grad.T @ grad)):
        state[name] = state[name] + covariance if name in state else covariance
    return root(state["left"]) @ grad @ root(state["right"])


def galore(grad: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Momentum in the space of the largest singular vectors."""
    if not state:
        state["basis"] = L.svd(grad, full_matrices=False)[0][:, :64].contiguous()
        state["mean"] = torch.zeros(64, grad.shape[1], device=grad.device)
    state["mean"].lerp_(state["basis"].T @ grad, 0.1)
    return state["basis"] @ state["mean"]


def gptq(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Rounds a layer's columns one after the other, and spreads each error over the columns that follow."""
    hessian = 2 * inputs.T @ inputs
    damping = 0.01 * torch.mean(torch.diag(hessian))
    hessian += damping * torch.eye(len(hessian), device=hessian.device)
    inverse = L.cholesky(torch.cholesky_inverse(L.cholesky(hessian)), upper=True)
    left, rounded = weight.clone(), torch.zeros_like(weight)
    scale = weight.abs().amax(1) / 7
    for column in range(4):
        rounded[:, column] = (left[:, column] / scale).round().clamp(-8, 7) * scale
        error = (left[:, column] - rounded[:, column]) / inverse[column, column]
        left[:, column:] -= error.unsqueeze(1) * inverse[column, column:].unsqueeze(0)
    return rounded


def main() -> None:
    failed = {}
    for name, function in every_function():
        try:
            function()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    known = L.inv(torch.tensor([[2.0, 0.0], [0.0, 4.0]], device="cuda")).tolist()
    Path(sys.argv[1]).write_text(json.dumps({"failed": failed, "known": known}))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).cuda()
    optimizers = [
        Factorising(layer.parameters(), how) for layer, how in zip(model, (soap, shampoo, galore), strict=True)
    ]
    for _ in range(STEPS):
        x = torch.randn(64, WIDTH, device="cuda")
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gptq(model[0].weight.detach(), torch.randn(1024, WIDTH, device="cuda"))
    print("largest eigenvalue", L.eigvalsh(model[1].weight.detach())[-1].item() > 0)


main()
