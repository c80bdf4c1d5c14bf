"""Answers of a healthy job, on the Python that runs the tests. Nothing here needs torch.

PYTEST_DONT_REWRITE: an assertion is to be what Python compiles.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from fakedist.gpu.values.healthy import Health, Healthy, Outlook
from fakedist.gpu.values.symbolic import Rows

# The functions below are what a script may write: what they are called with is a Tensor.
# ruff: noqa: SIM103

_healthy = Healthy(lambda frame, name: frame.f_locals.get(name))


class Tensor:
    """A tensor of one value that no kernel computed: what reads it gets a healthy job's."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.outlooks: list[Outlook] = []

    def _read(self, value: Any) -> Any:
        self.outlooks.append(_healthy.outlook(sys._getframe(2), value))
        self.value = self.outlooks[-1].answer
        return self.value

    def __bool__(self) -> bool:
        return bool(self._read(bool(self.value)))

    def __int__(self) -> int:
        return int(self._read(int(self.value)))

    def __float__(self) -> float:
        return float(self._read(float(self.value)))

    def item(self) -> Any:
        return self._read(self.value)

    def rows(self) -> Found:
        self.outlooks.append(_healthy.outlook(sys._getframe(1), Rows(3)))
        return Found(range(len(self.outlooks[-1].answer)))  # type: ignore[arg-type]

    def any(self) -> Tensor:
        return self

    def all(self) -> Tensor:
        return self


def _assertion(x: Any) -> None:
    assert x.all()


def _assertion_with_text(x: Any) -> None:
    assert not x.any(), f"{x}"


def _chained(x: Any) -> None:
    assert 0 <= x.item() <= 1


def _is_good(x: Any) -> bool:
    return bool(x.all())


def _has_none(x: Any) -> bool:
    if x.any():
        return False
    return True


def _helper(x: Any) -> None:
    assert _is_good(x)


def _helper_with_branch(x: Any) -> None:
    assert _has_none(x), "bad"


def _truths(x: Any) -> Iterator[bool]:
    yield bool(x)


def _iterated(x: Any) -> None:
    for each in _truths(x):
        assert each


def _fail() -> None:
    raise ValueError


class _Checked:
    bad = False

    def __init__(self, x: Any) -> None:
        self._x = x

    @property
    def is_good(self) -> bool:
        return bool(self._x)

    def fail(self) -> None:
        raise ValueError


def _result_with_text(x: Any) -> tuple[bool, str]:
    return (True, "") if x.all() else (False, "bad")


def _check(is_good: bool, text: Callable[[], str] | None = None) -> None:
    """As ``torch._check``."""
    if not is_good:
        raise RuntimeError(text and text())


def _checked(x: Any) -> None:
    _check(not x.any(), lambda: "bad")


_checks = ModuleType("fakedist_test_checks")
vars(_checks)["check"] = _check
sys.modules[_checks.__name__] = _checks


def _checked_by_an_import(x: Any) -> None:
    from fakedist_test_checks import check  # type: ignore[import-not-found]

    check(not x.any())


_STRICT = True


_ALL_MUST_HOLD: list[Callable[..., None]] = [
    _assertion, _helper, _iterated,
]  # fmt: skip
_NONE_MAY_HOLD: list[Callable[..., None]] = [
    _assertion_with_text, _helper_with_branch, _checked, _checked_by_an_import,
]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "answer"), [*((run, True) for run in _ALL_MUST_HOLD), *((run, False) for run in _NONE_MAY_HOLD)]
)
def test_a_check_passes_whatever_was_made_up(run: Callable[..., None], answer: bool) -> None:
    for made_up in (True, False):
        x = Tensor(made_up)
        run(x)
        assert all(outlook.answer is answer for outlook in x.outlooks)
        assert any(outlook.avoids in (Health.FAILS, Health.MAY_FAIL) for outlook in x.outlooks)


_FORMS = """
    if not x.all():
        for i in range(3): print(i, end="")
        raise ValueError(f"{x}")

    assert x.all() and x.all()

    is_good = x.all().item(); print(end="") if len(sys.argv) > 999 else None; assert is_good

    assert all([each.all() for each in [x, x]])

    assert all(each.all() for each in [x])

    assert all(map(_is_good, [x]))

    check = lambda: x.all(); assert check()

    with contextlib.nullcontext(): assert x.all()

    try: assert x.all()
    except AssertionError: raise SystemExit from None

    checked = _Checked(x); assert checked.is_good

    if not x.all() and _STRICT: raise ValueError

    if len(sys.argv) > 999 or not x.all(): raise ValueError

    is_good = True
    if not x.all(): is_good = False
    assert is_good

    problem = None if x.all() else "bad"
    if problem is not None: raise ValueError(problem)

    bad = False
    for each in [x]: bad |= not each.all().item()
    if bad: raise ValueError

    if any(not each.all().item() for each in [x]): raise ValueError

    for i in range(2):
        if not x.all(): raise ValueError(i)

    if not x.all(): _fail()

    if not x.all(): sys.exit(1)

    assert x.all().item() is True

    match x.all().item():
        case False: raise ValueError

    if not x.all(): _Checked(x).fail() or _fail()

    checked = _Checked(x); checked.bad = not x.all().item(); assert not checked.bad

    checks = {}; checks["good"] = bool(x.all()); assert checks["good"]

    problems = []
    if not x.all(): problems.append("bad")
    if problems: raise ValueError(problems)

    broken = {name: x for name in ("a", "b") if not x.all()}; assert not broken

    if broken := [name for name in ("a", "b") if not x.all()]: raise ValueError(broken)

    is_good, text = _result_with_text(x); assert is_good, text

    error = None if x.all() else ValueError()
    if error: raise error

    assert x.all().item() in (True, None)

    oks = []; [oks.append(bool(each.all())) for each in [x, x]]; assert all(oks)

    assert sum(not bool(each) for each in [x, x]) == 0

    assert False not in [bool(each.all()) for each in [x]]

    assert (bool(x.all()), 1) == (True, 1)

    assert {"ok": bool(x.all()), "text": sys.argv}["ok"]

    assert Result(bool(x.all()), sys.argv).is_good

    result = Result(is_good=bool(x.all()), text="a"); assert result.is_good, result.text

    problems = problems_of(x); assert not problems, problems

    assert len(problems_of(x)) == 0

    must_hold(is_good=bool(x.all()), text=f"{x}")

    must_all_hold(bool(x.all()), 1)

    counter = Counter(); counter.look(x); assert counter.bad == 0

    for is_good in [bool(x.all())]: assert is_good

    for name, is_good in [("a", bool(x.all()))]: assert is_good, name

    for name, is_good in {"a": bool(x.all())}.items(): assert is_good, name

    x.all() or breakpoint()

    1 / int(bool(x.all()))

    sys.exit(code_of(x))

    for _ in range(3):
        if x.all(): break
    else: raise RuntimeError

    from enum import Enum; State = Enum("State", "OK BAD")
    state = State.OK if x.all() else State.BAD
    if state is State.BAD: raise ValueError

    error = contextlib.ExitStack() if not x.all() else None
    if error is not None: raise ValueError

    text = "" if x.all() else f"bad {len(sys.argv)}"; assert not text

    problems = []
    if not x.all(): problems += ["bad", f"{x}"]
    if problems: raise ValueError

    def must_be_empty(problems): assert not problems
    problems = []
    if not x.all(): problems.extend(["bad", "worse"])
    must_be_empty(problems)

    def note(problems):
        if not x.all(): problems.append("bad")
    problems = []; note(problems); assert not problems

    bad = [0]
    if not x.all(): bad[0] += 1
    assert bad[0] == 0

    checks = {}; checks.update(good=bool(x.all())); assert checks["good"]

    checks = {name: bool(x.all()) for name in "ab"}; assert all(checks.values())

    for is_good, name in zip([bool(x.all())], ["a"]): assert is_good, name

    bad = list(filter(lambda each: not each.all(), [x])); assert not bad

    oks = [bool(x.all()), bool(x.all())]; assert oks == [True, True]

    bad = sum(1 for each in [x] if not each.all()); assert not bad

    assert next(each for each in [x] if each.all()) is x

    assert next((each for each in [x] if not each.all()), None) is None

    class Looker(Counter):
        def must_be_good(self): assert not self.bad
    looker = Looker(); looker.look(x); looker.must_be_good()

    handlers = {"good": str, "bad": _fail}; handlers["good" if x.all() else "bad"]()

    def fails_at_last():
        print(end="")
        _fail()
    if not x.all(): fails_at_last()

    import os
    if not x.all(): os.kill(0, 9)

    import asyncio
    async def check(): return bool(x.all())
    async def run(): assert await check()
    asyncio.run(run())
"""
Result = namedtuple("Result", ["is_good", "text"])


def problems_of(x: Any) -> list[str]:
    found = []
    if not x.all():
        found.append("bad")
    return found


def must_hold(*, is_good: bool, text: str) -> None:
    if not is_good:
        raise ValueError(text)


def must_all_hold(*conditions: object) -> None:
    if not conditions[0]:
        raise ValueError


class Counter:
    bad = 0

    def look(self, x: Any) -> None:
        if not x.all():
            self.bad += 1


def code_of(x: Any) -> int:
    return 0 if x.all() else 1


def forms(text: str) -> list[str]:
    """The bodies of functions in a text, between blank lines."""
    return text.strip("\n").split("\n\n")


def function_of(body: str) -> Callable[..., Any]:
    """The function of a body, which may call those of this module."""
    namespace = dict(globals())
    exec("def form(x):\n" + body.replace("; ", "\n    "), namespace)
    return namespace["form"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", forms(_FORMS))
def test_a_check_passes_in_any_form(body: str) -> None:
    for made_up in (True, False):
        with contextlib.suppress(SystemExit):
            function_of(body)(x := Tensor(made_up))
        assert all(outlook.answer is True for outlook in x.outlooks)


def _at_least_ten(x: Any) -> None:
    assert x.item() > 10


def _half_above_three(x: Any) -> None:
    assert float(x) / 2 > 3


def _not_zero(x: Any) -> None:
    assert int(x) != 0


def _finite_and_small(x: Any) -> None:
    value = x.item()
    if math.isnan(value) or value > 5:
        raise ValueError


def _as_many_as(x: Any, count: int = 4096) -> None:
    assert int(x) == count


def _one_for_each(x: Any) -> None:
    rows = memoryview(bytes(12)).cast("B", (3, 4))
    assert int(x) == rows.shape[0]
    assert int(x) == len("abc")


@pytest.mark.parametrize(
    ("run", "made_up"),
    [
        (_as_many_as, 0), (_one_for_each, 7), (_chained, 3.0), (_chained, -0.5), (_at_least_ten, 0.5),
        (_half_above_three, 0.5), (_not_zero, 0), (_finite_and_small, 7.0),
    ],
)  # fmt: skip
def test_a_number_that_a_check_refuses_becomes_one_that_passes(run: Callable[..., None], made_up: float) -> None:
    x = Tensor(made_up)
    run(x)
    assert x.value != made_up


@pytest.mark.parametrize(
    ("body", "made_up"),
    [
        ("assert Tensor(5).item() == x.item()", 0),
        ("assert abs(Tensor(5.0).item() - x.item()) < 1e-6", 3.0),
        ("least, most = 10, 20; assert least <= int(x) < most", 7),
        ("assert math.isclose(x.item(), 1.0, rel_tol=1e-3)", 9.0),
        ("math.log(x.item())", -2.0),
        ("1 / x.item()", 0.0),
    ],
)
def test_a_number_becomes_one_that_does_not_raise(body: str, made_up: float) -> None:
    form = function_of("    " + body)
    for x in (Tensor(0.5 if isinstance(made_up, float) else 12), Tensor(made_up)):
        form(x)
    assert x.value != made_up


def test_a_number_that_passes_stays() -> None:
    _chained(x := Tensor(0.25))
    assert x.value == 0.25


def _while_any(x: Any) -> Iterator[None]:
    while x.any():
        yield


def _until_any(x: Any) -> Iterator[None]:
    while True:
        if x.any():
            break
        yield


def _until_returned(x: Any) -> Iterator[None]:
    while True:
        if not x.any():
            return
        yield


def _until_all(x: Any) -> Iterator[None]:
    while not x.all():
        yield


def _while_either(x: Any) -> Iterator[None]:
    while x.any() or x.any():
        yield


def _a_few_times(x: Any) -> Iterator[None]:
    times = 0
    while times < 10 and not x.all():
        times += 1
        yield


def _with_an_exit(x: Any) -> Iterator[None]:
    times = 0
    while not x.all():
        times += 1
        yield
        if times > 1_000:
            break


def _while_helper(x: Any) -> Iterator[None]:
    while _has_none(x):
        yield


def _drawn_again(x: Any) -> Iterator[None]:
    while True:
        yield
        if x.any():
            continue
        return


def _pending(x: Any) -> Iterator[None]:
    pending = x.any()
    while pending:
        yield
        pending = x.any()


def _done(x: Any) -> Iterator[None]:
    is_done = False
    while not is_done:
        is_done = not x.any()
        yield


def _while_some_are_left(x: Any) -> Iterator[None]:
    waiting = [x]
    while len(waiting) > 0:
        yield
        waiting = [each for each in waiting if each.any()]


def _going(x: Any) -> Iterator[None]:
    state = _Checked(x)
    state.bad = True
    while state.bad:
        yield
        state.bad = x.any().item()


def _while_large(x: Any) -> Iterator[None]:
    error = x.item()
    while error > 1e-3:
        yield
        error = x.item()


def _while_large_a_few_times(x: Any) -> Iterator[None]:
    times = 0
    while x.item() > 1e-3 and times < 10:
        times += 1
        yield


def _until_small_or_often(x: Any) -> Iterator[None]:
    times = 0
    while not (x.item() < 1e-3 or times > 10):
        times += 1
        yield


def _returns_when_small_or_often(x: Any) -> Iterator[None]:
    times = 0
    while True:
        times += 1
        yield
        error = x.item()
        if error < 1e-3 or times > 10:
            return


def _either_exit(x: Any) -> Iterator[None]:
    times = 0
    while True:
        times += 1
        yield
        if x.all():
            return
        if times > 10:
            return


@pytest.mark.parametrize(
    ("run", "made_up", "most"),
    [
        (_while_any, True, 0), (_until_any, False, 0), (_until_returned, True, 0), (_until_all, False, 0),
        (_while_either, True, 0), (_a_few_times, False, 0), (_with_an_exit, False, 0), (_while_helper, False, 0),
        (_drawn_again, True, 1), (_pending, True, 0), (_done, True, 1), (_while_large, 4.0, 0),
        (_while_large_a_few_times, 4.0, 0), (_until_small_or_often, 4.0, 0), (_returns_when_small_or_often, 4.0, 1),
        (_either_exit, False, 1), (_while_some_are_left, True, 1), (_going, True, 1),
    ],
)  # fmt: skip
def test_a_loop_is_left(run: Callable[[Any], Iterator[None]], made_up: Any, most: int) -> None:
    for _ in range(2):  # in a loop of its own
        x = Tensor(made_up)
        for rounds, _ in enumerate(run(x)):
            assert rounds < most
        assert x.outlooks[0].avoids in (Health.MAY_STAY, Health.STAYS)


_LOOPS = """
    while not is_done:
        yield
        is_done = is_done or bool(x.all())

    while not is_done:
        yield
        if x.all(): is_done = True

    while count < 2:
        yield
        if x.all(): count += 1

    while kept:
        yield
        if x.all(): kept.pop()

    while len(kept) < 3:
        yield
        if not x.all(): continue
        kept.append(1)

    for _ in itertools.count():
        if x.all(): break
        yield

    for _ in iter(int, 1):
        if x.all(): return
        yield

    while True:
        rows = x.rows()
        if len(rows) == 0: break
        yield

    while x.rows().numel() > 0: yield

    while (number := x.rows().shape[0]) > 0: yield number

    oks = [False, False]
    while not all(oks):
        yield
        for i in range(2): oks[i] = bool(x.all())

    from signal import Signals
    state = Signals.SIGTERM
    while state is not Signals.SIGINT:
        yield
        if x.all(): state = Signals.SIGINT

    import collections
    waiting = collections.deque([1])
    while waiting:
        yield
        one = waiting.popleft()
        if not x.all(): waiting.append(one)

    def draw():
        yield
        if not x.all(): yield from draw()
    return (yield from draw())

    while x.rows(): yield
"""


class Found(list[int]):
    """Rows of a tensor."""

    def numel(self) -> int:
        return len(self)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), 1


@pytest.mark.parametrize("body", forms(_LOOPS)[:-1])
def test_a_loop_that_nothing_else_ends_is_left(body: str) -> None:
    for _ in range(2):
        x = Tensor(False)
        run = function_of("    is_done, count, kept = False, 0, [1]\n" + body)
        assert len(list(itertools.islice(run(x), 5))) < 4
        assert x.outlooks[0].avoids in (Health.MAY_STAY, Health.STAYS)


def _first_of_a_list(x: Any) -> None:
    for _ in range(3):
        if x.any():
            break


def _early_stop(x: Any) -> None:
    step = 0
    while step < 3:
        step += 1
        if x.any():
            break


def _two_ways(x: Any) -> int:
    return 1 if x.any() else 2


def _later_assertion(x: Any) -> None:
    if x.any():
        sizes = len(sys.argv)
        assert sizes < 1_000


def _compares_with_either(x: Any) -> None:
    assert x.any().item() is [x.value].pop()


def _draws_until_enough(x: Any) -> None:
    kept: list[int] = []
    while len(kept) < 2:
        if x.any():
            kept.append(1)
        kept.append(2)


def _changed_since(x: Any) -> None:
    is_bad = False
    if x.any():
        sys.argv.count("")
    is_bad = [not is_bad, False].pop()
    if is_bad:
        raise ValueError


def _another_loop(x: Any) -> None:
    if x.any():
        return
    is_done = False
    while not is_done:
        is_done = True


def _always_raises(x: Any) -> None:
    if x.any():
        print(1)
    raise KeyError


@pytest.mark.parametrize(
    "run",
    [
        _first_of_a_list, _early_stop, _two_ways, _later_assertion, _compares_with_either, _draws_until_enough,
        _changed_since, _another_loop, _always_raises,
    ],
)  # fmt: skip
def test_where_both_ways_are_healthy_the_answer_stays(run: Callable[[Any], object]) -> None:
    for made_up in (True, False):
        x = Tensor(made_up)
        with contextlib.suppress(KeyError):
            run(x)
        assert x.outlooks
        assert all(outlook.answer is made_up and outlook.avoids is Health.FINE for outlook in x.outlooks)


def test_an_answer_changes_with_the_variables_that_decide() -> None:
    def run(x: Any, strict: bool) -> bool:
        is_bad = bool(x.any())
        if strict and is_bad:
            raise ValueError
        return is_bad

    assert [run(Tensor(True), strict) for strict in (False, True, False)] == [True, False, True]


def test_what_changes_at_each_read_may_have_any_value() -> None:
    def run(x: Any, step: int, last: int) -> None:
        is_bad = bool(x.any())
        if step == last and is_bad:
            raise ValueError

    for step in range(50):
        run(Tensor(True), step, 49)


def test_a_number_that_is_logged_is_not_tested() -> None:
    x, log = Tensor(2.5), dict[str, float]()
    for step in range(2):
        log[f"loss {step}"] = x.item()
    print(f"{x.item():.2f}", math.sqrt(x.item()))
    assert not any(outlook.is_tested for outlook in x.outlooks)


def test_a_number_is_tested_where_the_variable_that_it_is_compared_with_has_changed() -> None:
    def is_tested(x: Tensor, best: float) -> bool:
        if x.item() > 3 * best:
            print(best)
        return x.outlooks[-1].is_tested

    assert [is_tested(Tensor(2.5), best) for best in (math.inf, 1, 2)] == [False, True, True]
