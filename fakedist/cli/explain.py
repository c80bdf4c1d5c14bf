"""``fakedist explain``."""

from __future__ import annotations

import click

from fakedist.cli.output import say


@click.command()
@click.argument("code", metavar="CODE")
def explain(code: str) -> int:
    """Print the page of a finding's rule.

    CODE is that of a finding, such as FD101: why the fault matters, how it is seen, what mends it, and where it was
    reported. docs/findings.md has all of them.
    """
    from fakedist.findings.rule_pages import page_of

    for line in page_of(code).splitlines():
        say(line)
    return 0
