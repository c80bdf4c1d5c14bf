"""Which running code handles an out-of-memory error, so that the script gets one."""

from __future__ import annotations

import contextlib
import linecache
import sys
import textwrap
import weakref
from collections.abc import Callable

import pytest
import torch

from fakedist.record.beyond_capacity import is_handled

_BEFORE = """
import contextlib
import torch
from torch.cuda import OutOfMemoryError as OwnName

def should_reduce(error):
    return any(text in error.args[0] for text in ("CUDA out of memory.", "cuDNN"))
def is_oom(error):
    return should_reduce(error)
def log(error):
    print(error)
@contextlib.contextmanager
def guard():
    try:
        yield
    except torch.OutOfMemoryError:
        print("halved")
class Trainer:
    @staticmethod
    def is_oom(error):
        return "out of memory" in str(error)
"""


def handled(body: str, *, with_source: bool = True) -> bool:
    """Whether a call of ``ask()`` in the body is inside of code that handles the error."""
    answers: list[bool] = []
    source = f"{_BEFORE}\n{textwrap.dedent(body)}"
    filename = "<no source>"
    if with_source:
        filename = f"/tmp/{abs(hash(source))}.py"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    ask: Callable[[], None] = lambda: answers.append(is_handled(sys._getframe(1)))  # noqa: E731
    try:
        exec(compile(source, filename, "exec"), {"ask": ask, "__name__": "script"})
    finally:
        linecache.cache.pop(filename, None)
    assert len(answers) == 1
    return answers[0]


@pytest.mark.parametrize(
    "handler",
    [
        "except torch.OutOfMemoryError: pass",
        "except torch.cuda.OutOfMemoryError: raise",
        "except (ValueError, OwnName): pass",
        "except RuntimeError as e:\n    if 'out of memory' in str(e): pass\n    else: raise",
        "except RuntimeError: size = 1",
        "except Exception as e:\n    if should_reduce(e): pass\n    else: raise",
        "except Exception as e:\n    if is_oom(e): pass\n    else: raise",
        "except Exception as e:\n    if Trainer.is_oom(e): pass\n    else: raise",
        "except Exception as e:\n    if isinstance(e, torch.OutOfMemoryError): pass\n    raise",
        "except KeyError: pass\nexcept BaseException as e:\n    print('CUDA Out Of Memory' in str(e))",
        "except ValueError as e: print('out of memory')\nexcept RuntimeError: pass",
    ],
)
def test_a_handler_that_names_the_error_or_looks_for_it_handles_it(handler: str) -> None:
    assert handled(f"try:\n    ask()\n{handler}")


@pytest.mark.parametrize(
    "handler",
    [
        "except ValueError: print('out of memory')",
        "except RuntimeError as e:\n    if 'size mismatch' not in str(e): raise",
        "except Exception as e: log(e)",
        "except Exception as e:\n    log(e)\n    raise",
        "except: pass",
        "finally: print('out of memory')",
        "except torch.AcceleratorError: pass" if hasattr(torch, "AcceleratorError") else "except OSError: pass",
    ],
)
def test_other_handlers_do_not(handler: str) -> None:
    assert not handled(f"try:\n    ask()\n{handler}")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("def work():\n    ask()\ntry:\n    work()\nexcept OwnName: pass", True),
        (
            "def work():\n    try:\n        ask()\n    except OSError: pass\ntry:\n    work()\nexcept OwnName: pass",
            True,
        ),
        ("try:\n    try:\n        ask()\n    except Exception: pass\nexcept OwnName: pass", False),  # never gets there
        ("try: pass\nexcept OwnName: pass\nelse: ask()", False),
        ("try: pass\nexcept OwnName: pass\nfinally: ask()", False),
        ("try:\n    raise OSError\nexcept OSError: ask()\nexcept OwnName: pass", False),
        ("try:\n    def work():\n        ask()\nexcept OwnName: pass\nwork()", False),  # defined in it, called outside
        ("with contextlib.suppress(OwnName): ask()", True),
        ("with contextlib.suppress(OSError): ask()", False),
        ("with guard(): ask()", True),
        ("with contextlib.nullcontext(): ask()", False),
        ("class Model:\n    try:\n        ask()\n    except OwnName: pass", True),
        ("ask()", False),
    ],
)
def test_the_try_or_with_around_the_call_counts(body: str, expected: bool) -> None:
    assert handled(body) == expected


def test_without_the_source_the_names_of_a_function_with_a_handler_count() -> None:
    assert handled("def work():\n    try: ask()\n    except torch.OutOfMemoryError: pass\nwork()", with_source=False)
    assert not handled("def work():\n    try: ask()\n    except ValueError: pass\nwork()", with_source=False)


@pytest.mark.parametrize("around", ["Mine = OSError", "Mine = torch.OutOfMemoryError"])
def test_a_class_in_a_variable_is_the_one_that_it_is_now(around: str) -> None:
    own = "def work():\n    {}\n    try: ask()\n    except Mine: pass\nwork()"
    shared = "def outer():\n    {}\n    def work():\n        try: ask()\n        except Mine: pass\n    work()\nouter()"
    assert [handled(body.format(around)) for body in (own, shared)] == [around.endswith("MemoryError")] * 2


def test_looking_keeps_nothing_alive_that_the_script_drops() -> None:
    def work() -> tuple[object, object]:
        held, kind = torch.ones(3), OSError
        known = weakref.ref(held)
        with contextlib.suppress(kind):
            assert not is_handled(sys._getframe())
        before = known()
        del held
        return before is not None, (before := None) or known()

    assert work() == (True, None)


def test_a_test_that_expects_the_error_handles_it() -> None:
    def fail() -> None:
        assert is_handled(sys._getframe())
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        fail()
