"""``fakedist doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fakedist.cli.output import JSON, TEXT, chosen_output, file_option, format_options
from fakedist.errors import ExitCode

if TYPE_CHECKING:
    from fakedist.launcher.doctor import Diagnosis


#: What needs neither torch nor a device.
_ONLY_READS = (
    "report, view, compare, time, nsys, calibrate and export work here: they read runs that were made "
    "elsewhere.\nprofile and check do not yet: they need what is missing above"
)


@click.command()
@file_option
@format_options(TEXT, JSON)
def doctor(*, file: Path | None, form: str | None, as_json: bool) -> int:
    """Show what works on this machine, and how to fix what does not."""
    from fakedist.launcher.doctor import diagnose

    output = chosen_output(form, as_json, file)
    diagnosis = diagnose()
    if output.format == JSON:
        output.write_object(diagnosis.to_dict())
    else:
        output.write_text(_text(diagnosis))
    return ExitCode.DONE if diagnosis.devices else ExitCode.ERROR


def _text(diagnosis: Diagnosis) -> str:
    lines = []
    for finding in diagnosis.findings:
        lines.append(f"{finding.state:<9} {finding.name:<12} {finding.text}")
        lines += [f"{'':<22} {finding.hint}"] if finding.hint else []
    devices = [f"--device {device}" for device in diagnosis.devices]
    works = f"{' and '.join(devices)} work{'s' if len(devices) == 1 else ''} here" if devices else _ONLY_READS
    return "\n".join([*lines, "", works]) + "\n"
