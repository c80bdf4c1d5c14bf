"""The share of draws of a run's router load that fit: a budget of ``check``, a column of ``sweep``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakedist.results.run import Run

_DRAWS = 1000


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


SHARES = {"fitting_draws": fitting_draws}
