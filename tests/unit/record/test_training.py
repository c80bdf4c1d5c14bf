import pytest
import torch
from torch import nn

from fakedist.record.cuda_graphs import Graphs
from fakedist.record.position import Position
from fakedist.record.steps import StepListener, StepSize, Training, live_bytes

MODEL, CRITIC = nn.Linear(4, 4), nn.Linear(4, 4)


class Job(StepListener):
    """A job whose optimizers step on request; ``ended`` has the samples of each step that ended."""

    def __init__(self) -> None:
        self.training = Training(Position(), 10, None, Graphs(), self)
        self.ended: list[tuple[int, int, str]] = []
        self.optimizers = [torch.optim.SGD(model.parameters()) for model in (MODEL, CRITIC)]

    def step_ended(self, step: int, start_us: int, end_us: int) -> None:
        self.ended.append((step, *self.training.samples_of(step)))

    def forward(self, model: nn.Module, *inputs: object) -> None:
        self.training.root_forward(model, inputs)
        self.training.backward()

    def step(self, number: int = 0) -> None:
        self.training.optimizer_begins(self.optimizers[number])
        self.training.optimizer_ended(self.optimizers[number])


def test_samples_of_a_step_are_its_inputs_first_dimensions_over_all_micro_batches() -> None:
    job = Job()
    for rows in (8, 8):
        job.forward(MODEL, {"name": "x", "image": torch.zeros(rows, 3, 5)}, torch.zeros(rows))
    with torch.no_grad():
        job.training.root_forward(MODEL, (torch.zeros(100, 3, 5),))
    job.step()
    job.training.steps.close()
    assert job.ended == [(1, 16, "3x5")]


def test_samples_are_those_of_the_model_that_runs_first_also_in_a_step_of_several_optimizers() -> None:
    job = Job()
    for _ in range(3):
        job.forward(MODEL, torch.zeros(8, 4))
        job.step(0)
        job.forward(CRITIC, torch.zeros(32, 4))
        job.step(1)
    job.training.steps.close()
    assert job.ended[-1] == (3, 8, "4")


def test_without_a_positional_tensor_samples_are_not_known() -> None:
    job = Job()
    job.forward(MODEL, "text", torch.zeros(()))
    job.step()
    job.training.steps.close()
    assert job.ended == [(1, 0, "")]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_a_nested_input_are_samples_without_a_shape() -> None:
    rows = [torch.zeros(each, 4) for each in (3, 5)]
    job = Job()
    for layout in (torch.jagged, torch.strided):
        job.forward(MODEL, torch.nested.nested_tensor(rows, layout=layout))
    job.step()
    assert job.training.size_of(1) == StepSize(4, 64, 2)
    job.training.steps.close()
    assert job.ended == [(1, 4, "")]


def test_the_size_of_a_step_has_the_rows_of_the_first_input_and_the_elements_of_all() -> None:
    job = Job()
    for rows in (8, 8):
        job.forward(MODEL, torch.zeros(rows, 3), [torch.zeros(5, 4)])
    assert job.training.size_of(1) == (16, 2 * (24 + 20), 8)
    assert job.training.size_of(2) == (0, 0, 0)


def test_live_bytes_are_those_that_were_requested_and_the_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, requested = (
        {
            pool: {"current": bytes_}
            for pool, bytes_ in (("all", large + 700), ("large_pool", large), ("small_pool", 700))
        }
        for large in (3 << 20, 2 << 20)
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    stats = {"allocated_bytes": allocated, "requested_bytes": requested}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: stats, raising=False)
    assert live_bytes() == {0: (2 << 20, 700, 3 << 20)}
