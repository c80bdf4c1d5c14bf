"""``fakedist mcp``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from fakedist.errors import SetupError
from fakedist.launcher.machine import host_memory_bytes
from fakedist.units import parse_bytes

#: Share of this machine's memory that one tool may hold, unless --memory-limit names another limit.
_MEMORY_SHARE = 0.75


@click.command()
@click.option(
    "--project",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="Tools read and write below this directory alone.  [default: this one]",
)
@click.option("--allow-run", is_flag=True, help="Also offer the tools that run scripts: profile, sweep and check.")
@click.option(
    "--time-limit",
    type=click.IntRange(1),
    default=1800,
    metavar="SECONDS",
    help="End a tool after this.",
    show_default=True,
)
@click.option(
    "--memory-limit", metavar="SIZE", help="End a tool that holds more memory.  [default: 75% of this machine's]"
)
def mcp(*, project: Path, allow_run: bool, time_limit: int, memory_limit: str | None) -> int:
    """Serve an agent with reports, over the Model Context Protocol.

    The agent starts it and speaks to it on stdin and stdout; docs/mcp.md has the line to add to three usual agents.
    Its tools read reports, times on other GPUs, comparisons, matches and lines as data. Scripts run only with
    --allow-run.
    """
    if find_spec("mcp") is None:
        raise SetupError("the package mcp is not installed", "pip install 'fakedist[mcp]'")
    from fakedist.extras.mcp.server import Limits, make_server

    most_bytes = int(host_memory_bytes() * _MEMORY_SHARE) if memory_limit is None else parse_bytes(memory_limit)
    make_server(project, Limits(time_limit, most_bytes), may_run=allow_run).run("stdio")
    return 0


COMMAND = mcp
