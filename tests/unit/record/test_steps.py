"""Where steps end, which forwards are an evaluation's, and the samples and the size of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fakedist.errors import RecordingError, StopRun
from fakedist.record.alive import all_alive
from fakedist.record.cuda_graphs import Graphs
from fakedist.record.loading import StepSize
from fakedist.record.position import Position
from fakedist.record.steps import After, Evaluations, StepListener, Steps, Training, any_waits, live_bytes


class Optimizer:
    pass


class Log:
    """Steps that ended, and those that turned out to go on, of a job whose optimizers named ``exist`` exist."""

    def __init__(self, limit: int = 10, exist: str = "") -> None:
        self.ended: list[int] = []
        self.merged: list[int] = []
        self.optimizers = {name: Optimizer() for name in "abc"}
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.of: list[int] = []
        self._exist = [id(self.optimizers[name]) for name in exist]
        self.steps = Steps(
            After(limit), lambda step, start_us, end_us: self.ended.append(step), self._goes_on, self._waits
        )

    def _goes_on(self, step: int) -> None:
        self.merged.append(step)
        self.ended = [number for number in self.ended if number != step]
        self.of = [min(number, step) for number in self.of]

    def _waits(self, stepped: Container[int]) -> bool:
        return any(optimizer not in stepped for optimizer in self._exist)

    def micro_batch(self) -> None:
        self.steps.work()
        self.steps.work()

    def optimizer_step(self, optimizer: object) -> None:
        self.steps.optimizer_begins(optimizer)
        self.steps.optimizer_ended(optimizer)

    def made(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([self.weight])
        self.steps.optimizer_made(optimizer)
        return optimizer

    def turns(self, names: str) -> str:
        """Work and a step of each optimizer by name; the step that each turned out to be of."""
        for name in names:
            self.steps.work()
            self.optimizer_step(self.optimizers[name])
            self.of.append(self.steps.number)
        return "".join(map(str, self.of))

    def run(self, script: str) -> None:
        """Run work (w), steps of optimizers (a, b, n: a new one), of one with a closure ([...]), manual ends (m), |."""
        actions = {
            "w": self.steps.work,
            "m": self.steps.manual,
            "|": self.steps.close,
            "[": lambda: self.steps.optimizer_begins(self.optimizers["a"]),
            "]": lambda: self.steps.optimizer_ended(self.optimizers["a"]),
        }
        for letter in script:
            if letter in "abcn":
                self.optimizer_step(self.optimizers.get(letter) or Optimizer())
            else:
                actions[letter]()


@pytest.mark.parametrize(
    ("script", "ended", "number"),
    [
        ("", [], 0),
        ("w", [], 1),
        ("wwa", [], 1),
        ("wwaw", [1], 2),
        ("wwwwwwww", [], 1),  # gradients are accumulated
        ("wwwwwwwwaww", [1], 2),
        ("wwab" * 3, [1, 2], 3),  # optimizers that step together
        ("wwaw[wwwwwwwwww]", [1], 2),  # a closure
        ("wa" * 3, [1, 2], 3),  # backwards alone
        ("aaaa", [1, 2], 3),  # neither modules nor backwards: the same optimizer steps again
        ("aaaa|", [1, 2, 3], 3),
        ("a|", [], 0),  # only makes the optimizer's state
        ("aww", [], 1),
        ("awwaww", [1], 2),
        ("m", [1], 2),
        ("m" + "wwa" * 3, [1], 2),  # the search is off
        ("m" + "wwa" * 3 + "m", [1, 2], 3),
        ("wwa|", [1], 1),  # the script ends by itself
        ("ww|", [], 1),  # cut short
        ("wwaaa" * 2, [1], 2),  # an optimizer that steps once for each part of its parameters
        ("wwn" * 3, [1, 2], 3),
    ],
)
def test_a_step_ends_at_the_first_work_after_an_optimizers_step(script: str, ended: list[int], number: int) -> None:
    log = Log()
    log.run(script)
    assert (log.ended, log.steps.number) == (ended, number)


@pytest.mark.parametrize(("first", "second"), [("wwa", "b"), ("", "a")])
def test_a_closure_works_in_its_optimizers_step_also_in_the_first_or_the_second_one(first: str, second: str) -> None:
    log, numbers = Log(limit=3), list[int]()

    def train() -> None:
        while True:
            log.run(first)
            log.steps.optimizer_begins(log.optimizers[second])
            log.micro_batch()
            numbers.append(log.steps.number)
            log.steps.optimizer_ended(log.optimizers[second])

    with pytest.raises(StopRun):
        train()
    assert (numbers, log.ended) == ([1, 2, 3], [1, 2, 3])


def test_the_run_stops_where_the_step_after_the_last_would_begin_and_each_time_again() -> None:
    log = Log(limit=2)
    log.run("wwawwa")
    for _ in range(3):
        with pytest.raises(StopRun):
            log.steps.work()
    assert (log.ended, log.steps.last) == ([1, 2], 2)
    assert not issubclass(StopRun, Exception)  # `except Exception` does not swallow it
    by_hand = Log(limit=2)
    by_hand.run("m")
    with pytest.raises(StopRun):
        by_hand.run("m")
    assert by_hand.ended == [1, 2]


def test_more_steps_run_and_are_not_counted_as_recorded() -> None:
    ended: list[int] = []
    log = Log()
    log.steps = Steps(After(2), lambda step, start_us, end_us: ended.append(step), num_more=2)
    with pytest.raises(StopRun):
        log.turns("a" * 9)
    assert (ended, log.steps.last) == ([1, 2, 3, 4], 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("aaaa", "1234"),
        ("abababab", "11223344"),
        ("abbabbabb", "111222333"),
        ("aaabaaab", "12334566"),  # a generator after every third critic: in the step of that critic
        ("abaabaaab", "112334566"),
        ("abcabcabc", "111222333"),
        ("aaa" + "b" * 20, "123" + "3" * 16 + "4567"),  # another optimizer takes over for good
    ],
)
@pytest.mark.parametrize("known", ["", "abc"])
def test_a_step_lasts_until_the_optimizer_that_stepped_first_steps_again(names: str, expected: str, known: str) -> None:
    assert Log(99, known).turns(names) == expected


@pytest.mark.parametrize(
    ("limit", "names", "of"),
    [
        (2, "abababab", [1, 1, 2, 2]),
        (1, "abab", [1, 1]),
        (2, "aaaa", [1, 2]),  # one that never steps does not hold up the second step
    ],
)
def test_steps_of_a_gan_are_iterations_if_its_optimizers_exist(limit: int, names: str, of: list[int]) -> None:
    log = Log(limit, "ab")
    with pytest.raises(StopRun):
        log.turns(names)
    assert (log.of, log.ended) == (of, list(range(1, limit + 1)))


def test_work_that_only_a_new_optimizer_ends_is_of_the_same_step() -> None:
    log = Log()
    assert log.turns("ab") == "11"
    assert (log.merged, log.ended) == ([1], [])
    assert log.turns("a") == "112"
    assert log.ended == [1]


def test_optimizers_in_backward_step_in_any_order() -> None:
    log = Log()
    optimizers = [Optimizer() for _ in range(3)]
    for turn in (optimizers, optimizers[::-1], optimizers[1:]):
        log.steps.work()
        for optimizer in turn:
            log.steps.optimizer_begins(optimizer, in_backward=True)
            log.steps.optimizer_ended(optimizer, in_backward=True)
    assert (log.ended, log.steps.number) == ([1, 2], 3)


def test_a_clock_that_is_set_changes_no_steps_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    steps = Steps(After(10), lambda step, start_us, end_us: lengths.append(end_us - start_us))
    year_ns = 365 * 86_400 * 10**9
    real = time.time_ns
    for number in range(4):
        monkeypatch.setattr(time, "time_ns", lambda ahead=(number % 3 - 1) * year_ns: real() + ahead)
        steps.manual()
    assert len(lengths) == 4
    assert all(0 <= length < year_ns // 1000 // 2 for length in lengths)


def test_work_before_any_optimizer_exists_is_init() -> None:
    job = Log()
    job.steps.work()
    assert (job.steps.number, job.merged) == (1, [])  # a script without an optimizer trains in step 1
    optimizer = job.made()
    job.steps.work()
    assert (job.steps.number, job.merged) == (1, [0])
    job.optimizer_step(optimizer)
    job.made()  # nothing that is made later takes a step back
    job.steps.work()
    assert (job.steps.number, job.merged, job.ended) == (2, [0], [1])


@pytest.mark.parametrize(
    ("script", "number", "merged"),
    [
        ("owow", 1, []),  # only the first optimizer takes the first step back
        ("wgos", 1, []),  # gradients that are there: the optimizer belongs to the step
        ("wgows", 1, []),
        ("wgozw", 1, [0]),  # gradients that are dropped before the next work were a probe's
        ("wocs", 1, []),  # made between a forward and its backward
        ("wcow", 1, [0]),  # the backward of a probe does not make it a step
        ("wogs", 0, [0]),  # creates its state after a probe, as torch's distributed checkpoints do
        ("wogsw", 1, [0]),
        ("wmow", 2, []),  # a script that counts its own steps goes on counting
    ],
)
def test_work_before_the_first_optimizer_is_a_probe_unless_it_is_the_optimizers_first_step(
    script: str, number: int, merged: list[int]
) -> None:
    """Work (w), a backward (c), gradients made (g) or dropped (z), an optimizer made (o) or stepping (s), m by hand."""
    job, made = Log(), list[torch.optim.Optimizer]()
    actions: dict[str, Callable[[], object]] = {
        "w": job.steps.work,
        "c": lambda: job.steps.work(continues=True),
        "g": lambda: setattr(job.weight, "grad", torch.zeros(1)),
        "z": lambda: made[-1].zero_grad(),
        "o": lambda: made.append(job.made()),
        "s": lambda: job.optimizer_step(made[-1]),
        "m": job.steps.manual,
    }
    for letter in script:
        actions[letter]()
    assert (job.steps.number, job.merged) == (number, merged)


def model(*, frozen: bool = False) -> nn.Module:
    return nn.Linear(1, 1).requires_grad_(not frozen)


def forward(evaluations: Evaluations, module: nn.Module, *, grad: bool = True, stepped: bool = True) -> None:
    with torch.set_grad_enabled(grad):
        evaluations.root_forward(module, stepped)


def test_an_evaluation_ends_where_training_goes_on() -> None:
    evaluations, trained = Evaluations(), model()
    forward(evaluations, trained, stepped=False)
    forward(evaluations, trained)
    assert not evaluations.seen
    forward(evaluations, trained, grad=False)
    forward(evaluations, trained, grad=False)
    assert (evaluations.running, evaluations.num_ended) == (True, 0)
    forward(evaluations, trained)
    assert (evaluations.running, evaluations.num_ended) == (False, 1)


def test_a_frozen_model_in_each_step_or_a_generator_without_grad_is_no_evaluation() -> None:
    evaluations, trained, encoder = Evaluations(), model(), model(frozen=True).eval()
    for stepped in (False, True):
        forward(evaluations, encoder, grad=False, stepped=stepped)
        forward(evaluations, trained, stepped=stepped)
    assert not evaluations.seen
    evaluations, generator, critic = Evaluations(), model(), model()
    for stepped in (False, True):
        forward(evaluations, generator, grad=False, stepped=stepped)
        forward(evaluations, critic, stepped=stepped)
        forward(evaluations, generator, stepped=stepped)
    assert not evaluations.seen
    forward(evaluations, generator.eval(), grad=False)
    assert evaluations.seen


def test_a_model_in_eval_that_trained_in_train_is_evaluated_with_grad_too() -> None:
    evaluations, trained = Evaluations(), model()
    forward(evaluations, trained, stepped=False)
    forward(evaluations, trained.eval())
    assert evaluations.seen


MODEL, CRITIC = nn.Linear(4, 4), nn.Linear(4, 4)


class Job(StepListener):
    """A job whose optimizers step on request; ``ended`` has the samples of each step that ended."""

    def __init__(self, limit: int = 10) -> None:
        self.training = Training(Position(), limit, None, Graphs(), self)
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


def test_updates_on_one_rollout_are_one_step() -> None:
    log = Log()
    log.steps = Steps(After(2), lambda step, start_us, end_us: log.ended.append(step), updates=3)
    steps = []
    for _ in range(2):
        log.micro_batch()  # the rollout
        for _ in range(3):
            log.micro_batch()
            steps.append(log.steps.number)
            log.optimizer_step(log.optimizers["a"])
    assert (steps, log.ended) == ([1, 1, 1, 2, 2, 2], [1])
    with pytest.raises(StopRun):
        log.micro_batch()
    assert log.ended == [1, 2]


def test_updates_that_the_script_s_end_cuts_off_are_no_step() -> None:
    log = Log()
    log.steps = Steps(After(9), lambda step, start_us, end_us: log.ended.append(step), updates=2)
    log.turns("aaa")
    log.steps.close()
    assert log.ended == [1]


def test_updates_within_backward_cannot_be_counted() -> None:
    steps = Steps(After(9), lambda step, start_us, end_us: None, updates=2)
    steps.work()
    steps.optimizer_begins(steps, in_backward=True)
    with pytest.raises(RecordingError, match="2 updates cannot be one step"):
        steps.optimizer_ended(steps, in_backward=True)


@pytest.mark.parametrize(("later", "codes"), [(False, ["rollout_in_first_step"]), (True, [])])
def test_a_rollout_in_the_first_step_alone_has_a_note(later: bool, codes: list[str]) -> None:
    job = Job()
    for step in range(3):
        with torch.no_grad():
            for _ in range(3 if later or not step else 0):
                job.forward(MODEL, torch.zeros(8, 4))
        job.forward(MODEL, torch.zeros(8, 4))
        job.step()
    assert [note.code for note in job.training.notes()] == codes


def test_a_stop_that_the_script_caught_has_a_note() -> None:
    job = Job(limit=2)
    for _ in range(2):
        job.forward(MODEL, torch.zeros(8, 4))
        job.step()
    codes = []
    for _ in range(2):
        with pytest.raises(StopRun):
            job.forward(MODEL, torch.zeros(8, 4))
        codes.append([note.code for note in job.training.notes()])
    assert codes == [[], ["stop_swallowed"]]


def test_a_batch_that_is_taken_between_a_forward_and_its_backward_feeds_the_step() -> None:
    job, loader = Job(), DataLoader(TensorDataset(torch.zeros(4, 4)), batch_size=2)
    with job.training.loading.watching():
        job.training.root_forward(MODEL, (torch.zeros(8, 4),))
        next(iter(loader))
        job.training.backward()
    assert [note.code for note in job.training.loading.notes()] == ["data_loader"]


def test_samples_of_a_step_are_its_inputs_first_dimensions_over_all_micro_batches() -> None:
    job = Job()
    for rows in (8, 8):
        job.forward(MODEL, {"name": "x", "image": torch.zeros(rows, 3, 5)}, torch.zeros(rows))
    with torch.no_grad():
        job.training.root_forward(MODEL, (torch.zeros(100, 3, 5),))
    assert not job.training.is_counted
    job.step()
    assert job.training.is_counted
    job.training.steps.close()
    assert job.ended == [(1, 16, "3x5")]


IMAGES = [torch.zeros(3, 8, width) for width in (8, 16)]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (IMAGES, (2, "3x8x8")),  # torchvision's detectors
        ([{"height": 8, "image": image, "boxes": torch.zeros(5, 4)} for image in IMAGES], (2, "3x8x8")),  # Detectron2's
        ([torch.zeros(6, 3, 8, 8), torch.zeros(6, 3, 4, 4)], (6, "3x8x8")),  # crops of one batch
        ([{"input_ids": torch.zeros(6, 16)}] * 2, (6, "16")),  # pairs of sentences
    ],
)
def test_a_list_of_images_has_a_sample_each(batch: list[object], expected: tuple[int, str]) -> None:
    job = Job()
    job.forward(MODEL, batch)
    job.step()
    job.training.steps.close()
    assert job.ended == [(1, *expected)]


def test_samples_are_those_of_the_model_that_runs_first_also_in_a_step_of_several_optimizers() -> None:
    job = Job()
    for _ in range(3):
        job.forward(MODEL, torch.zeros(8, 4))
        job.step(0)
        job.forward(CRITIC, torch.zeros(32, 4))
        job.step(1)
    job.training.steps.close()
    assert job.ended[-1] == (3, 8, "4")


def test_a_script_tells_the_shape_of_a_sample() -> None:
    job = Job()
    for shape in ((3, 7), ()):
        job.forward(MODEL, torch.zeros(8, 4))
        job.training.step(shape)
    job.training.step((5,))  # no model ran
    assert job.ended == [(1, 8, "3x7"), (2, 8, "4"), (3, 1, "5")]


def test_a_step_has_the_name_that_the_script_says_or_that_of_an_evaluation_before_its_training() -> None:
    job = Job()
    for evaluates in (False, True, False):
        if evaluates:
            with torch.no_grad():
                job.training.root_forward(MODEL, (torch.zeros(100, 4),))
        job.forward(MODEL, torch.zeros(8, 4))
        job.step()
    assert [job.training.name_of(step) for step in (1, 2, 3)] == ["", "evaluation", ""]
    job.training.step(name="rollout")
    assert job.training.name_of(3) == "rollout"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_a_nested_input_are_samples_without_a_shape_and_without_a_tensor_none_are_known() -> None:
    rows = [torch.zeros(each, 4) for each in (3, 5)]
    nested = [torch.nested.nested_tensor(rows, layout=layout) for layout in (torch.jagged, torch.strided)]
    for inputs, size in (([(each,) for each in nested], StepSize(4, 64, 2, 32)), ([("text", torch.zeros(()))], None)):
        job = Job()
        for each in inputs:
            job.forward(MODEL, *each)
        job.step()
        assert size is None or job.training.size_of(1) == size
        job.training.steps.close()
        assert job.ended == [(1, 0 if size is None else 4, "")]


def test_the_size_of_a_step_has_the_rows_of_the_first_input_and_the_elements_of_all() -> None:
    job = Job()
    for rows in (8, 8):
        job.forward(MODEL, torch.zeros(rows, 3), [torch.zeros(5, 4)])
    assert job.training.size_of(1) == (16, 2 * (24 + 20), 8, 44)
    assert job.training.size_of(2) == (0, 0, 0, 0)


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


def test_an_optimizer_waits_if_it_has_parameters_that_none_that_stepped_has() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    first, again, second = (torch.optim.SGD([weights[number]]) for number in (0, 0, 1))
    living = set(map(id, all_alive().of(lambda kind: issubclass(kind, torch.optim.Optimizer))))
    assert {id(first), id(again), id(second)} <= living
    assert any_waits(living - {id(second)})
    assert not any_waits(living - {id(again)})  # wraps the first one
