"""``fakedist doctor``."""

from __future__ import annotations

import json

import click

from fakedist.errors import ExitCode


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def doctor(as_json: bool) -> int:
    """Say what works on this machine, and what to type for what does not."""
    from fakedist.launch.doctor import diagnose

    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        for finding in diagnosis.findings:
            click.echo(f"{finding.state:<9} {finding.name:<12} {finding.text}")
            if finding.hint:
                click.echo(f"{'':<22} {finding.hint}")
        works = " and ".join(f"--device {device}" for device in diagnosis.devices)
        click.echo(f"\n{works} works here" if works else "\nnothing works here yet")
    return ExitCode.DONE if diagnosis.devices else ExitCode.ERROR
