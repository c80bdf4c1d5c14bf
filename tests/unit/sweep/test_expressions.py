from __future__ import annotations

import pytest

from fakedist.errors import SweepError
from fakedist.sweep.space import Expression, Scalar

NAMES: dict[str, Scalar] = {"tp": 4, "pp": 8, "kind": "full", "on": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tp * pp", 32),
        ("tp * pp <= 32", True),
        ("80 % pp == 0 and tp in (1, 2)", False),
        ("tp in [1, 4]", True),
        ("kind == 'full' or on", True),
        ("not on", False),
        ("64 // (tp * pp)", 2),
        ("2 ** tp", 16),
        ("min(tp, pp) + max(1, abs(-2))", 6),
        ("pp if on else tp", 8),
        ("ceil_div(61, 16)", 4),
        ("1 < tp < 8", True),
        ("on == true", True),
        ("'x' + kind", "xfull"),
    ],
)
def test_an_expression_computes_and_compares(text: str, value: Scalar) -> None:
    assert Expression(text, "where:").value(NAMES) == value


def test_an_expression_names_what_it_uses() -> None:
    assert Expression("min(tp, 8) * pp and true", "where:").names == {"tp", "pp"}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch x')",
        "().__class__.__bases__",
        "tp.real",
        "kind.format(tp)",
        "[x for x in (1, 2)]",
        "(lambda: 1)()",
        "open('/etc/passwd')",
        "eval('1')",
        "exec('1')",
        "print(1)",
        "f'{tp}'",
        "{'a': 1}",
        "tp[0]",
        "min(*[1, 2])",
        "min(1, 2, key=abs)",
        "x := 1",
        "import os",
        "tp = 8",
        "1; 2",
        "",
        "tp <=",
        "b'x'",
        "1 + " * 300 + "1",
        "(" * 500 + "1" + ")" * 500,
        "await tp",
        "...",
    ],
)
def test_an_expression_runs_nothing(text: str) -> None:
    with pytest.raises(SweepError):
        Expression(text, "where:").value(NAMES)


@pytest.mark.parametrize(
    "text",
    [
        "1 / (tp - 4)",
        "kind < 1",
        "9 ** 9 ** 9",
        "10 ** 64 ** 64",
        "'a' * 10 ** 9",
        "'%999999999d' % 1",
        "[1] * 9 ** 9",
        "(1, 2)",
        "log2(0)",
        "kind % 1",
    ],
)
def test_an_expression_without_a_value_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(SweepError, match=r"has no value|gives no number"):
        Expression(text, "where:").value(NAMES)
