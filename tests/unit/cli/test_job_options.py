"""Help of the commands, and the options that each of them takes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from fakedist.cli import main
from fakedist.cli.entry import cli

#: Options of a job without effect on a command, as they are typed. Each is refused there.
WITHOUT_EFFECT = {
    "sweep": ["--device=virtual", "--nsys", "--nsys-args=-x"],
}
#: What -j and --cold do is a matter of how the ranks run, not of the output.
HEADINGS = {
    "profile": {
        "--rank": "Job",
        "-m": "Job",
        "--gpu": "Device",
        "--steps": "Recording",
        "--all-rows": "Output",
        "-j, --jobs": "Execution",
        "--cold": "Execution",
        "-o, --output": "Output",
        "--json": "Output",
    },
    "sweep": {"-j, --jobs": "Execution", "--cold": "Execution", "--on": "Execution", "--axis": "Sweep"},
    "check": {"-j, --jobs": "Execution", "--cold": "Execution", "--config": "Check", "--junit": "Output"},
    "time": {"--gpu": "Pricing", "--micro-batches": "Pricing", "--what-if": "Pricing", "--table": "Output"},
}


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out.splitlines()


def test_no_summary_is_cut_on_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(capsys=capsys)
    summaries = dict(line.split(None, 1) for line in lines[lines.index("Commands:") + 1 :])
    assert set(summaries) == set(cli.commands)
    for name, summary in summaries.items():
        paragraph = str(cli.commands[name].help).partition("\n\n")[0]
        assert summary == " ".join(paragraph.split())


@pytest.mark.parametrize(
    ("command", "option", "heading"),
    [(command, option, heading) for command, options in HEADINGS.items() for option, heading in options.items()],
)
def test_an_option_stands_under_its_heading(
    command: str, option: str, heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    above = ""
    for line in help_of(command, capsys=capsys):
        if line.endswith(":") and not line.startswith(" "):
            above = line.removesuffix(":")
        if line.strip().startswith((f"{option} ", f"{option}=")):
            assert above == heading
            return
    pytest.fail(f"{command} has no {option}")


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command, options in WITHOUT_EFFECT.items() for option in options]
)
def test_an_option_without_effect_is_unknown(
    command: str, option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    assert main([command, "--world-size=8", option, str(tmp_path / "train.py")]) == 2
    error = capsys.readouterr().err
    assert f"No such option '{option.partition('=')[0]}'" in error
    assert f"fakedist {command} --help" in error


def test_what_leaves_rows_out_has_one_name_for_showing_them() -> None:
    for name in ("report", "compare", "profile", "time", "nsys"):
        flags = {flag for param in cli.commands[name].params for flag in param.opts}
        assert "--all-rows" in flags
        assert not {"--all", "--all-layers"} & flags


def test_the_rank_is_described_as_each_command_takes_it() -> None:
    helps = {}
    for name in ("profile", "sweep"):
        (option,) = (param for param in cli.commands[name].params if param.name == "rank")
        assert isinstance(option, click.Option)
        helps[name] = str(option.help)
    assert "stages" in helps["profile"]
    assert helps["sweep"].endswith("[default: ends]")
