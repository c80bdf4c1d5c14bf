"""Steps with more than one optimizer's step: a GAN, a closure, updates on a rollout, a replayed graph, a test."""

import sys
import unittest

import torch
from torch import nn

WIDTH, ROWS = 1024, 4096


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(2)])
    return model, torch.optim.Adam(model.parameters())


def gan() -> None:
    (generator, of_generator), (critic, of_critic) = make(), make()
    for number in range(6):
        print("ITERATION", number, flush=True)
        critic(generator(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)).detach()).mean().backward()
        of_critic.step()
        of_critic.zero_grad()
        critic(generator(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16))).mean().backward()
        of_generator.step()
        of_generator.zero_grad()


def closure() -> None:
    model, optimizer = make()

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)).float().mean()
        loss.backward()
        return loss

    for number in range(6):
        print("ITERATION", number, flush=True)
        optimizer.step(evaluate)


def rollout() -> None:
    model, optimizer = make()
    for number in range(6):
        print("ITERATION", number, flush=True)
        states = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(4):
                states = model(states)
        for _ in range(3):
            model(states).float().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def graph() -> None:
    model, optimizer = make()
    inputs = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    model(inputs).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        model(inputs).float().mean().backward()
    for number in range(6):
        print("ITERATION", number, flush=True)
        captured.replay()
        optimizer.step()


class Training(unittest.TestCase):
    def tearDown(self) -> None:
        print("torn down", flush=True)

    def test_training(self) -> None:
        with self.subTest("gan"):
            gan()

    def test_which_is_not_reached(self) -> None:
        self.fail("not reached")


if __name__ == "__main__":
    how = sys.argv.pop(1)
    {"gan": gan, "closure": closure, "rollout": rollout, "graph": graph, "unittest": unittest.main}[how]()
