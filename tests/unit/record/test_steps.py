import pytest

from fakedist.record.steps import Steps, StopRun


class Log:
    def __init__(self, limit: int = 10) -> None:
        self.ended: list[int] = []
        self.steps = Steps(limit, lambda step, start_us, end_us: self.ended.append(step))

    def micro_batch(self) -> None:
        self.steps.root_forward()
        self.steps.backward()

    def optimizer_step(self, optimizer: object) -> None:
        self.steps.optimizer_begins(optimizer)
        self.steps.optimizer_ended(optimizer)


@pytest.fixture
def adam() -> object:
    return object()


def test_everything_before_the_first_forward_is_step_0() -> None:
    log = Log()
    assert log.steps.number == 0
    log.steps.root_forward()
    assert log.steps.number == 1
    assert log.ended == []


def test_a_step_ends_at_the_first_forward_after_the_optimizer(adam: object) -> None:
    log = Log()
    log.micro_batch()
    log.optimizer_step(adam)
    assert log.ended == []
    log.steps.root_forward()
    assert log.ended == [1]
    assert log.steps.number == 2


def test_gradient_accumulation_does_not_count(adam: object) -> None:
    log = Log()
    for _ in range(4):
        log.micro_batch()
    assert log.steps.number == 1
    log.optimizer_step(adam)
    log.micro_batch()
    assert log.ended == [1]


def test_two_optimizers_that_step_together_are_one_step(adam: object) -> None:
    log = Log()
    sgd = object()
    for _ in range(3):
        log.micro_batch()
        log.optimizer_step(adam)
        log.optimizer_step(sgd)
    assert log.steps.number == 3


def test_a_closure_evaluated_inside_the_optimizer_is_no_step(adam: object) -> None:
    log = Log()
    log.micro_batch()
    log.optimizer_step(adam)
    log.steps.root_forward()
    log.steps.optimizer_begins(adam)
    for _ in range(5):
        log.micro_batch()
    log.steps.optimizer_ended(adam)
    assert log.steps.number == 2


def test_without_modules_the_next_backward_tells_steps_apart(adam: object) -> None:
    log = Log()
    for _ in range(3):
        log.steps.backward()
        log.optimizer_step(adam)
    assert log.ended == [1, 2]


def test_without_modules_and_backward_the_same_optimizer_stepping_again_does(adam: object) -> None:
    log = Log()
    for _ in range(4):
        log.optimizer_step(adam)
    assert log.ended == [1, 2]
    log.steps.close()
    assert log.ended == [1, 2, 3]


def test_an_optimizer_that_steps_before_any_work_only_makes_its_state(adam: object) -> None:
    log = Log()
    log.optimizer_step(adam)
    log.steps.close()
    assert log.steps.number == 0
    assert log.ended == []
    log.micro_batch()
    assert (log.steps.number, log.ended) == (1, [])
    log.optimizer_step(adam)
    log.micro_batch()
    assert (log.steps.number, log.ended) == (2, [1])


def test_the_run_stops_where_the_step_after_the_last_would_begin(adam: object) -> None:
    log = Log(limit=2)
    for _ in range(2):
        log.micro_batch()
        log.optimizer_step(adam)
    with pytest.raises(StopRun):
        log.steps.root_forward()
    assert log.ended == [1, 2]
    assert log.steps.last == 2


def test_a_swallowed_stop_is_raised_again(adam: object) -> None:
    log = Log(limit=1)
    log.micro_batch()
    log.optimizer_step(adam)
    for _ in range(3):
        with pytest.raises(StopRun):
            log.steps.root_forward()
    assert log.ended == [1]


def test_except_exception_does_not_swallow_the_stop() -> None:
    assert not issubclass(StopRun, Exception)


def test_manual_steps_switch_the_search_off(adam: object) -> None:
    log = Log()
    log.steps.manual()
    assert log.ended == [1]
    for _ in range(3):
        log.micro_batch()
        log.optimizer_step(adam)
    assert log.steps.number == 2
    log.steps.manual()
    assert log.ended == [1, 2]


def test_manual_steps_stop_the_run_at_the_limit() -> None:
    log = Log(limit=2)
    log.steps.manual()
    with pytest.raises(StopRun):
        log.steps.manual()
    assert log.ended == [1, 2]


def test_the_last_step_of_a_script_that_ends_by_itself_is_ended_by_close(adam: object) -> None:
    log = Log()
    log.micro_batch()
    log.optimizer_step(adam)
    log.steps.close()
    assert log.ended == [1]


def test_a_step_that_was_cut_short_is_not_counted_as_ended() -> None:
    log = Log()
    log.micro_batch()
    log.steps.close()
    assert log.ended == []
