"""A finding of a run, as ``--json`` prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A fault of the job that a rule saw in its run; what it gives to mend it is *estimated*.

    Attributes:
        code: The rule, such as FD101. ``fakedist explain FD101`` prints its page.
        name: The rule in a few words.
        text: The fault and its figures in this run, one sentence.
        change: What to change.
        line: The line that does it, ``file:line (function)``; empty if there is none.
        gives_low_bytes: How much lower the allocated peak would be at least, replayed; null if that is not known.
        gives_high_bytes: The same at most.
        gives_low_us: How much shorter the step would be at least; null if that is not known.
        gives_high_us: The same at most.
        is_certain: Whether the recording shows the whole fault; else the job may do it on purpose, or the host's time
            decides it.
        advice: The rule of the advice, or the option of the what-if, that mends it; empty without one.
        share: The larger of the shares of the reserved peak and of the step that it gives, or takes.
    """

    code: str
    name: str
    text: str
    change: str
    line: str = ""
    gives_low_bytes: int | None = None
    gives_high_bytes: int | None = None
    gives_low_us: float | None = None
    gives_high_us: float | None = None
    is_certain: bool = True
    advice: str = ""
    share: float = 0.0
