"""``fakedist completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

#: The variable by which a shell asks the program for completions; click's convention.
VARIABLE = "_FAKEDIST_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print a script that completes commands and options in a shell.

    bash: add eval "$(fakedist completion bash)" to ~/.bashrc. zsh: the same in ~/.zshrc, after compinit. fish: fakedist
    completion fish > ~/.config/fish/completions/fakedist.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "fakedist", VARIABLE).source())
    return 0
