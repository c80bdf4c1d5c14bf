"""How a rank ended: the outcome, the exit code and a message. The rank, its parent and every report use this record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fakedist.errors import ExitCode


class Outcome(StrEnum):
    """How a rank ended, as run.json has it."""

    #: It has not ended.
    RUNNING = "running"
    #: The script ran to its last line.
    FINISHED = "finished"
    #: fakedist stopped the script after its last recorded step.
    STOPPED = "stopped"
    #: The script called ``sys.exit`` or ``os._exit``. The code is the script's own.
    EXIT = "exit"
    #: The script raised an error.
    EXCEPTION = "exception"
    #: fakedist itself failed in the midst of the script, which is not to blame.
    FAULT = "fakedist_failed"
    #: The rank does not fit the GPU: its script got the error, or went on beyond the GPU's memory.
    OUT_OF_MEMORY = "out_of_memory"
    #: Ctrl-C or SIGTERM.
    INTERRUPTED = "interrupted"
    #: The time given with ``--timeout`` was over. Only the parent sees it.
    TIMEOUT = "timeout"
    #: A signal killed it. Only the parent sees it.
    KILLED = "killed"
    #: Its processes held more host memory than they may. Only an executor sees it, and no run directory has it.
    HOST_MEMORY = "host_memory"
    #: It could not start. No run directory has this outcome.
    ERROR = "error"


_BY_ITSELF = (Outcome.FINISHED, Outcome.EXIT)
_SCRIPT_OUTCOMES = (Outcome.EXCEPTION, Outcome.EXIT, Outcome.TIMEOUT, Outcome.KILLED)


#: What follows the name of a signal that the script sent to its own process.
BY_ITSELF = ", which it sent itself"
#: Signals by which limits of memory, time and files end a process.
_LIMIT_SIGNALS = ("by SIGKILL", "by SIGXCPU", "by SIGXFSZ")


@dataclass(frozen=True, slots=True)
class Ending:
    """How the rank ended.

    Attributes:
        outcome: How it ended.
        code: The exit code of fakedist; None while the rank runs.
        message: More about it, one line; may be empty.
    """

    outcome: Outcome
    code: int | None
    message: str = ""

    @property
    def ended_by_itself(self) -> bool:
        """Whether the script came to its end or left by itself, with any code."""
        return self.outcome in _BY_ITSELF

    @property
    def ended_well(self) -> bool:
        """Whether the script ended without an error: at its end, after its last step, or by an exit with code 0."""
        return self.outcome in (Outcome.FINISHED, Outcome.STOPPED) or (self.outcome is Outcome.EXIT and self.code == 0)

    @property
    def in_words(self) -> str:
        """How it ended, with the first sentence of the message."""
        message = self.message.split(". ")[0]
        return self.outcome.replace("_", " ") + (f" ({message})" if message else "")

    @property
    def is_refusal(self) -> bool:
        """Whether the script's argument parser refused its command line."""
        return self.outcome is Outcome.EXIT and self.code == ExitCode.USAGE and bool(self.message)

    @property
    def is_accident(self) -> bool:
        """Whether a signal killed it that neither it nor a limit had sent: it may end well the next time."""
        if self.outcome is not Outcome.KILLED or self.message.startswith(_LIMIT_SIGNALS):
            return False
        return self.message.startswith("by SIG") and not self.message.endswith(BY_ITSELF)

    @property
    def failed(self) -> bool:
        """Whether the script itself failed, and not because of the GPU's size or a Ctrl-C."""
        return bool(self.code) and self.outcome in _SCRIPT_OUTCOMES


#: The end of a run that would have ended well, had it not needed more memory than the GPU has.
BEYOND_CAPACITY = Ending(Outcome.OUT_OF_MEMORY, 4, "it went on beyond the GPU's memory")
