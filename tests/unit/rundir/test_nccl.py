"""NCCL's variables: which count, and how NCCL reads them."""

from __future__ import annotations

import pytest

from fakedist.errors import JobError
from fakedist.rundir.environment import check_variable, nccl_variables, number


@pytest.mark.parametrize(
    ("text", "value"),
    list(
        {"4194304": 4194304, "0x10": 16, "010": 8, "4M": 4, " 7": 7, "-2": -2, "M": None, "": None, "09": None}.items()
    ),
)
def test_numbers_are_read_as_strtoll_reads_them(text: str, value: int | None) -> None:
    assert number({"NCCL_BUFFSIZE": text}, "NCCL_BUFFSIZE") == value


def test_a_variable_that_does_not_count_is_refused_with_the_option_that_sets_it() -> None:
    with pytest.raises(JobError) as caught:
        check_variable("NCCL_BUFSIZE", "1")
    assert "did you mean NCCL_BUFFSIZE?" in caught.value.hint
    assert "--env NCCL_BUFSIZE=1" in caught.value.hint


def test_a_value_that_nccl_would_not_read_whole_is_refused() -> None:
    for value in ("4M", "big", ""):
        with pytest.raises(JobError, match="not a whole number"):
            check_variable("NCCL_BUFFSIZE", value)
    check_variable("NCCL_ALGO", "^Tree")
    check_variable("NCCL_MAX_NCHANNELS", "8")


def test_only_what_counts_and_is_set_is_kept() -> None:
    environ = {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Ring", "NCCL_PROTO": "", "HOME": "/"}
    assert nccl_variables(environ) == {"NCCL_ALGO": "Ring"}
