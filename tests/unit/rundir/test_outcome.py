from __future__ import annotations

import pytest

from fakedist.rundir.outcome import BY_ITSELF, Ending, Outcome


@pytest.mark.parametrize(
    ("ending", "is_accident"),
    [
        (Ending(Outcome.KILLED, 139, "by SIGSEGV"), True),
        (Ending(Outcome.KILLED, 134, "by SIGABRT"), True),
        (Ending(Outcome.KILLED, 139, f"by SIGSEGV{BY_ITSELF}"), False),
        (Ending(Outcome.KILLED, 137, "by SIGKILL; the machine may have run out of memory"), False),
        (Ending(Outcome.KILLED, 137, "by SIGKILL"), False),
        (Ending(Outcome.KILLED, 143, "with fakedist profile, which was killed"), False),
        (Ending(Outcome.HOST_MEMORY, 137, "its processes held 9 GiB"), False),
        (Ending(Outcome.EXCEPTION, 1, "by SIGSEGV"), False),
    ],
)
def test_an_accident_is_a_signal_of_neither_the_script_nor_a_limit(ending: Ending, is_accident: bool) -> None:
    assert ending.is_accident == is_accident
