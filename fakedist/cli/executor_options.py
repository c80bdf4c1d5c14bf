"""The options of commands that run many jobs: where, and how many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., object])


cold_option = click.option(
    "--cold",
    is_flag=True,
    help="Start every rank in a new interpreter. Otherwise ranks fork from a process that has imported torch.",
)


def executor_options(command: _Command) -> _Command:
    """Give a command ``--on``, ``--jobs`` and ``--cold``.

    They are for :func:`fakedist.launch.executors.choosing.make_executor`.
    """
    where = click.option(
        "--on",
        default="local",
        show_default=True,
        metavar="PLACE",
        help="Where jobs run: local, ray (the cluster of RAY_ADDRESS, or the one this machine is part of) or "
        "ray://HOST:PORT.",
    )
    how_many = click.option(
        "--jobs",
        "-j",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many jobs to run at once on this machine.  [default: as many as its cores and free memory allow]",
    )
    return where(how_many(cold_option(command)))
