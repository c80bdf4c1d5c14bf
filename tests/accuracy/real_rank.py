"""One rank of a job whose other ranks are processes too: the harness, in a world that is not faked.

    python -m tests.accuracy.real_rank RUN_DIRECTORY

The same recorder on the same GPU, real or virtual, around the same script; the process groups are torch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fakedist.rank import main as harness
from fakedist.rank.reporter import Failed, Message, Reporter


class _Rank(harness.Rank):
    def _world(self, recorder: Any) -> AbstractContextManager[Callable[[], list[str]]]:
        if self._job.arguments[-1] == "gloo":
            return nullcontext(list)
        from tests.accuracy.host_group import real_world

        return real_world(recorder.ledger)


class _Reporter(Reporter):
    """Errors of ours go to stderr: there is no parent of ours."""

    def send(self, message: Message) -> None:
        if isinstance(message, Failed):
            print(f"{message.error}\n{message.hint}", file=sys.stderr)


def main(run_directory: str) -> int | str | None:
    """Run the job of ``run_directory`` in this process, as the rank that RANK and WORLD_SIZE say."""
    harness.Rank = _Rank  # type: ignore[misc]
    harness.Reporter = _Reporter  # type: ignore[misc]
    return harness.main(run_directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
