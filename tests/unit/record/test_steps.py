import time
from collections.abc import Container

import pytest
import torch

from fakedist.errors import StopRun
from fakedist.record.steps import After, Steps


class Optimizer:
    pass


class Log:
    """Steps that end, of a job that runs a script of letters."""

    def __init__(self, limit: int = 10) -> None:
        self.ended: list[int] = []
        self.steps = Steps(After(limit), lambda step, start_us, end_us: self.ended.append(step))
        self.optimizers = {"a": Optimizer(), "b": Optimizer()}

    def micro_batch(self) -> None:
        self.steps.work()
        self.steps.work()

    def optimizer_step(self, optimizer: object) -> None:
        self.steps.optimizer_begins(optimizer)
        self.steps.optimizer_ended(optimizer)

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
            if letter in "abn":
                self.optimizer_step(self.optimizers.get(letter) or Optimizer())
            else:
                actions[letter]()


@pytest.fixture
def adam() -> object:
    return Optimizer()


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


def test_a_closure_of_an_optimizer_that_steps_second_is_of_the_same_step(adam: object) -> None:
    log, lbfgs = Log(limit=3), Optimizer()
    numbers = []

    def train() -> None:
        while True:
            log.micro_batch()
            log.optimizer_step(adam)
            log.steps.optimizer_begins(lbfgs)
            log.micro_batch()
            numbers.append(log.steps.number)
            log.steps.optimizer_ended(lbfgs)

    with pytest.raises(StopRun):
        train()
    assert (numbers, log.ended) == ([1, 2, 3], [1, 2, 3])


def test_the_run_stops_where_the_step_after_the_last_would_begin(adam: object) -> None:
    log = Log(limit=2)
    for _ in range(2):
        log.micro_batch()
        log.optimizer_step(adam)
    with pytest.raises(StopRun):
        log.steps.work()
    assert log.ended == [1, 2]
    assert log.steps.last == 2


def test_a_swallowed_stop_is_raised_again(adam: object) -> None:
    log = Log(limit=1)
    log.micro_batch()
    log.optimizer_step(adam)
    for _ in range(3):
        with pytest.raises(StopRun):
            log.steps.work()
    assert log.ended == [1]


def test_except_exception_does_not_swallow_the_stop() -> None:
    assert not issubclass(StopRun, Exception)


def test_manual_steps_stop_the_run_at_the_limit() -> None:
    log = Log(limit=2)
    log.steps.manual()
    with pytest.raises(StopRun):
        log.steps.manual()
    assert log.ended == [1, 2]


class Turns:
    """Optimizers that step in turn, with work before each of their steps."""

    def __init__(self, limit: int = 10, *names: str) -> None:
        self.ended: list[int] = []
        self.went_on: list[int] = []
        self.optimizers = {name: Optimizer() for name in "abc"}
        self.exist = [self.optimizers[name] for name in names]
        self.steps = Steps(
            After(limit), lambda step, start_us, end_us: self.ended.append(step), self.merged, self.waits
        )
        self.of: list[int] = []

    def merged(self, step: int) -> None:
        self.went_on.append(step)
        self.ended = [number for number in self.ended if number != step]
        self.of = [min(number, step) for number in self.of]

    def waits(self, stepped: Container[int]) -> bool:
        return any(id(optimizer) not in stepped for optimizer in self.exist)

    def run(self, names: str) -> str:
        """Work and a step of each optimizer by name; the step that each turned out to be of."""
        for name in names:
            self.steps.work()
            self.steps.optimizer_begins(self.optimizers[name])
            self.steps.optimizer_ended(self.optimizers[name])
            self.of.append(self.steps.number)
        return "".join(map(str, self.of))


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
    turns = Turns(99, *known)
    assert turns.run(names) == expected


def test_two_steps_of_a_gan_are_two_iterations() -> None:
    turns = Turns(2, "a", "b")
    with pytest.raises(StopRun):
        turns.run("abababab")
    assert turns.of == [1, 1, 2, 2]
    assert turns.ended == [1, 2]


def test_one_step_of_a_gan_is_one_iteration_if_its_optimizers_exist() -> None:
    turns = Turns(1, "a", "b")
    with pytest.raises(StopRun):
        turns.run("abab")
    assert turns.of == [1, 1]


def test_an_optimizer_that_never_steps_does_not_hold_up_the_second_step() -> None:
    turns = Turns(2, "a", "b")
    with pytest.raises(StopRun):
        turns.run("aaaa")
    assert turns.of == [1, 2]
    assert turns.ended == [1, 2]


def test_work_that_only_a_new_optimizer_ends_is_of_the_same_step() -> None:
    turns = Turns()
    assert turns.run("ab") == "11"
    assert turns.went_on == [1]
    assert turns.ended == []
    assert turns.run("a") == "112"
    assert turns.ended == [1]


def test_optimizers_in_backward_step_in_any_order() -> None:
    log = Log()
    optimizers = [Optimizer() for _ in range(3)]
    for turn in (optimizers, optimizers[::-1], optimizers[1:]):
        log.steps.work()
        for optimizer in turn:
            log.steps.optimizer_begins(optimizer, in_backward=True)
            log.steps.optimizer_ended(optimizer, in_backward=True)
    assert (log.ended, log.steps.number) == ([1, 2], 3)


def test_closures_work_inside_of_the_optimizer_from_the_first_step_on(adam: object) -> None:
    log = Log(limit=2)
    numbers = []

    def train() -> None:
        for _ in range(3):
            log.steps.optimizer_begins(adam)
            log.micro_batch()
            numbers.append(log.steps.number)
            log.steps.optimizer_ended(adam)

    with pytest.raises(StopRun):
        train()
    assert (numbers, log.ended) == ([1, 2], [1, 2])


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


class Probed:
    """A job that works before its first optimizer is made; ``merged`` has the steps that turned out to go on."""

    def __init__(self) -> None:
        self.merged: list[int] = []
        self.ended: list[int] = []
        self.steps = Steps(After(10), lambda step, start_us, end_us: self.ended.append(step), self.merged.append)
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def made(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([self.weight])
        self.steps.optimizer_made(optimizer)
        return optimizer

    def optimizer_step(self, optimizer: object) -> None:
        self.steps.optimizer_begins(optimizer)
        self.steps.optimizer_ended(optimizer)


def test_work_before_any_optimizer_exists_is_init() -> None:
    job = Probed()
    job.steps.work()
    assert (job.steps.number, job.merged) == (1, [])  # a script without an optimizer trains in step 1
    optimizer = job.made()
    job.steps.work()
    assert (job.steps.number, job.merged) == (1, [0])
    job.optimizer_step(optimizer)
    job.made()  # nothing that is made later takes a step back
    job.steps.work()
    assert (job.steps.number, job.merged, job.ended) == (2, [0], [1])


def test_only_the_first_optimizer_takes_the_first_step_back() -> None:
    job = Probed()
    job.made()
    job.steps.work()
    job.made()
    job.steps.work()
    assert (job.steps.number, job.merged) == (1, [])


@pytest.mark.parametrize("steps_at_once", [True, False])
def test_an_optimizer_made_for_gradients_that_are_there_belongs_to_the_step(steps_at_once: bool) -> None:
    job = Probed()
    job.steps.work()
    job.weight.grad = torch.ones(1)
    optimizer = job.made()
    if not steps_at_once:
        job.steps.work()
    job.optimizer_step(optimizer)
    assert (job.steps.number, job.merged) == (1, [])


def test_gradients_that_are_dropped_before_the_next_work_were_a_probes() -> None:
    job = Probed()
    job.steps.work()
    job.weight.grad = torch.ones(1)
    optimizer = job.made()
    optimizer.zero_grad()
    job.steps.work()
    assert job.merged == [0]


def test_an_optimizer_made_between_a_forward_and_its_backward_belongs_to_the_step() -> None:
    job = Probed()
    job.steps.work()
    optimizer = job.made()
    job.steps.work(continues=True)
    job.optimizer_step(optimizer)
    assert (job.steps.number, job.merged) == (1, [])


def test_the_backward_of_a_probe_does_not_make_it_a_step() -> None:
    job = Probed()
    job.steps.work()
    job.steps.work(continues=True)
    job.made()
    job.steps.work()
    assert job.merged == [0]


def test_an_optimizer_that_creates_its_state_after_a_probe_is_init() -> None:
    job = Probed()
    job.steps.work()
    optimizer = job.made()
    job.weight.grad = torch.zeros(1)  # as torch's distributed checkpoints do
    job.optimizer_step(optimizer)
    assert (job.steps.number, job.merged) == (0, [0])
    job.steps.work()
    assert job.steps.number == 1


def test_a_script_that_counts_its_own_steps_goes_on_counting() -> None:
    job = Probed()
    job.steps.work()
    job.steps.manual()
    job.made()
    job.steps.work()
    assert (job.steps.number, job.merged, job.ended) == (2, [], [1])
