"""``torch.func``: derivatives, batches and calls of modules as functions."""

from __future__ import annotations

import torch
from cases import Rank, case, same
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn import functional

EAGER = "functorch/test_eager_transforms.py: "


def numbers(rank: Rank, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape or (3,)).to(rank.device)


def cubes(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor**3).sum()


@case(EAGER + "test_primitive", "the gradient of a function")
def gradient(rank: Rank) -> None:
    same(grad(torch.Tensor.sin)(numbers(rank)[0]), numbers(rank)[0].cos())
    same(grad(cubes)(numbers(rank)), 3 * numbers(rank) ** 2)


@case(EAGER + "test_grad_and_value", "the gradient and the value")
def with_value(rank: Rank) -> None:
    slope, value = grad_and_value(cubes)(numbers(rank))
    same(slope, 3 * numbers(rank) ** 2)
    same(value, cubes(numbers(rank)))


@case(EAGER + "test_nesting_simple", "a gradient of a gradient")
def second(rank: Rank) -> None:
    same(grad(grad(torch.sin))(numbers(rank)[0]), -numbers(rank)[0].sin())


@case(EAGER + "test_per_sample_grads_simple", "each sample's gradient is its own")
def per_sample(rank: Rank) -> None:
    torch.manual_seed(1)
    net, batch = nn.Linear(4, 2).to(rank.device), numbers(rank, 5, 4)
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(net, parameters, (sample[None],))
        return out.square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, batch)
    for place, sample in enumerate(batch):
        wanted = grad(loss)(parameters, sample)
        for name in parameters:
            same(found[name][place], wanted[name])


@case(EAGER + "test_basic (vjp)", "the product of a vector with the Jacobian")
def backwards(rank: Rank) -> None:
    out, pull = vjp(torch.sin, numbers(rank))
    same(out, numbers(rank).sin())
    same(pull(torch.ones_like(out))[0], numbers(rank).cos())


@case(EAGER + "test_simple (jvp)", "the product of the Jacobian with a vector")
def forwards(rank: Rank) -> None:
    out, tangent = jvp(torch.sin, (numbers(rank),), (torch.ones_like(numbers(rank)),))
    same(out, numbers(rank).sin())
    same(tangent, numbers(rank).cos())


@case(EAGER + "test_linearize_basic", "a function linearized once, applied to a tangent")
def linear(rank: Rank) -> None:
    out, push = linearize(torch.sin, numbers(rank))
    same(out, numbers(rank).sin())
    same(push(torch.ones_like(out)), numbers(rank).cos())


@case(EAGER + "test_against_reference_simple (jacrev)", "a Jacobian by rows")
def jacobian_backwards(rank: Rank) -> None:
    same(jacrev(torch.sin)(numbers(rank)), torch.diagflat(numbers(rank).cos()))


@case(EAGER + "test_against_reference_simple (jacfwd)", "a Jacobian by columns")
def jacobian_forwards(rank: Rank) -> None:
    same(jacfwd(torch.sin)(numbers(rank)), torch.diagflat(numbers(rank).cos()))


@case(EAGER + "test_hessian_simple", "second derivatives, forwards over backwards")
def hessians(rank: Rank) -> None:
    same(hessian(cubes)(numbers(rank)), torch.diagflat(6 * numbers(rank)))


@case(EAGER + "test_hessian_vectorize_correctness_simple", "a batch of second derivatives")
def batch_of_hessians(rank: Rank) -> None:
    batch = numbers(rank, 4, 3)
    found = vmap(hessian(cubes))(batch)
    for place in range(4):
        same(found[place], torch.diagflat(6 * batch[place]))


@case(EAGER + "test_ensemble_regression", "an ensemble of modules runs as one batch")
def ensemble(rank: Rank) -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(rank.device) for _ in range(3)]
    parameters, buffers = stack_module_state(nets)  # type: ignore[arg-type]
    base, batch = nets[0], numbers(rank, 5, 4)
    found = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(parameters, buffers, batch)
    for place, net in enumerate(nets):
        same(found[place], net(batch))


@case(EAGER + "test_maml_regression", "a step inside a step has a gradient")
def step_in_a_step(rank: Rank) -> None:
    batch = numbers(rank, 5, 1)

    def inner(weight: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(batch * weight, batch.sin())

    def outer(weight: torch.Tensor) -> torch.Tensor:
        return inner(weight - 0.1 * grad(inner)(weight))

    weight = torch.tensor(0.5, device=rank.device)
    second_slope = hessian(inner)(weight)
    moved = weight - 0.1 * grad(inner)(weight)
    same(grad(outer)(weight), grad(inner)(moved) * (1 - 0.1 * second_slope))


@case(EAGER + "test_simple_view (functionalize)", "writes in place become copies")
def without_writes(rank: Rank) -> None:
    def written(tensor: torch.Tensor) -> torch.Tensor:
        twice = tensor.clone()
        twice.view(-1).add_(1)
        return twice

    same(functionalize(written)(numbers(rank, 2, 2)), numbers(rank, 2, 2) + 1)


@case("functorch/test_vmap.py: test_multiple_inputs", "two batches run at once")
def two_batches(rank: Rank) -> None:
    same(vmap(torch.mul)(numbers(rank, 3, 2), numbers(rank, 3, 2)), numbers(rank, 3, 2) ** 2)


@case("functorch/test_vmap.py: test_nested_out_dims", "a batch in another axis of the result")
def other_axis(rank: Rank) -> None:
    found = vmap(lambda row: row.sin(), in_dims=1, out_dims=1)(numbers(rank, 3, 2))
    same(found, numbers(rank, 3, 2).sin())


@case("test_stateless.py: test_functional_call", "a module with other parameters, which stay what they were")
def called(rank: Rank) -> None:
    net = nn.Linear(1, 1).to(rank.device)
    before = net.weight.detach().clone()
    weights = {"weight": rank.full(2, 1, 1), "bias": rank.full(3, 1)}
    same(functional_call(net, weights, (rank.full(5, 1, 1),)), 13)
    same(net.weight, before)


@case("test_autograd.py: test_hessian_vectorize_correctness_simple", "autograd's own second derivatives")
def autograds_own(rank: Rank) -> None:
    for vectorize in (False, True):
        found = torch.autograd.functional.hessian(cubes, numbers(rank), vectorize=vectorize)
        assert isinstance(found, torch.Tensor)
        same(found, torch.diagflat(6 * numbers(rank)))
