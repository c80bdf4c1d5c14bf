"""Docstrings that are data are the same where Python leaves docstrings out."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT

_SAYS = """
import click, sys
from fakedist.cli.entry import cli
from tools.schema_page import pages
print([command.get_help(click.Context(command)) for command in (cli, *cli.commands.values())], pages())
"""


def said(optimize: str) -> str:
    environment = {**os.environ, "PYTHONOPTIMIZE": optimize, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", _SAYS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_pages_are_the_same_without_docstrings() -> None:
    with_them = said("")
    assert "Run one rank of a thousand-GPU PyTorch job" in with_them
    assert said("2") == with_them
