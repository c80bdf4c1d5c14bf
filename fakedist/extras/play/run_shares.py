"""The shares of draws that fit, of a run's router load or its lengths: budgets of ``check``, columns of ``sweep``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakedist.results.run import Run

_DRAWS = 1000
_STEPS, _SEQUENCES = 50, 20


def fitting_draws(run: Run) -> float:
    """The part of 1,000 draws of the run's router load in which the rank that receives most has enough memory.

    Raises:
        FakedistError: The run has no load of experts, or cannot be played.
    """
    from fakedist.extras.play.router_draws import fitting_share, open_playable
    from fakedist.temporary import scratch_directory

    playable = open_playable(run.path)
    with scratch_directory("play") as folder:
        return fitting_share(playable, range(_DRAWS), playable.player(folder / "program.npz"))


def fitting_steps(run: Run) -> float:
    """The part of 1,000 steps, 20 sequences of 50 of the run's recorded lengths, that have enough memory.

    Raises:
        FakedistError: The run's steps have one length, or cannot be played.
    """
    from fakedist.extras.play import long_runs

    return long_runs.fitting_steps(long_runs.open_playable_steps(run.path), _STEPS, range(_SEQUENCES))


SHARES = {"fitting_draws": fitting_draws, "fitting_steps": fitting_steps}
