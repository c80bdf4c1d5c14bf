"""Files that users copy fit the program: the options exist, the examples are read."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from fakedist.check.config import SHARES, read_config
from fakedist.cli.check import check
from fakedist.cli.compare import compare
from fakedist.cli.profile import profile
from fakedist.options.definition import OPTIONS

ROOT = Path(__file__).parent.parent.parent.parent
FILES = [
    ROOT / "action.yml",
    *(ROOT / "docs" / name for name in ("ci.md", "tutorials/a-build-that-fails.md")),
    *sorted((ROOT / "examples/ci").iterdir()),
]
STEPS = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
DOCUMENT = (ROOT / "docs/ci.md").read_text()
TUTORIAL = (ROOT / "docs/tutorials/a-build-that-fails.md").read_text()


def options(*commands: click.Command) -> set[str]:
    return {
        name
        for command in commands
        for option in command.params
        if not getattr(option, "hidden", False)
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("--")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_option_in_what_users_copy_exists(path: Path) -> None:
    text = path.read_text()
    assert "fakedist check" in text or "fakedist@" in text
    commands = re.findall(r"fakedist (?:check|compare|profile)[^\n`|]*", text)
    if path.name == "action.yml":
        commands += re.findall(r"(?:options|report)\+?=\((.*)\)", text)
    used = {option for command in commands for option in re.findall(r"--[a-z][a-z-]+", command)}
    assert used <= options(check, compare, profile)


def test_the_document_has_the_programs_options_and_a_configuration_that_is_read(tmp_path: Path) -> None:
    table = DOCUMENT[DOCUMENT.index("## What comes out") : DOCUMENT.index("| exit code |")]
    told = set(re.findall(r"^\| `(--[a-z-]+)", table, flags=re.MULTILINE))
    assert told == options(check) - {"--config", "--update", "--no-annotations"}
    (text,) = re.findall(r"```toml\n(.*?)```", TUTORIAL, flags=re.DOTALL)
    (tmp_path / "fakedist.toml").write_text(text)
    (job,) = read_config(tmp_path / "fakedist.toml").jobs
    assert job.budgets
    assert job.tolerances


@pytest.mark.parametrize("heading", ["A job is one", "Budgets are absolute"])
def test_every_key_in_the_document_is_known(tmp_path: Path, heading: str) -> None:
    table = DOCUMENT[DOCUMENT.index(heading) :].split("\n\n")[1]
    keys = [key for line in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert len(keys) > 6
    source = (ROOT / "fakedist/check/config.py").read_text()
    options = {*(option.toml_key for option in OPTIONS), *SHARES}
    assert [key for key in keys if f'"{key}"' not in source and key not in options] == []


def test_inputs_of_the_action_are_never_pasted_into_its_script() -> None:
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) == 3
    assert [script for script in scripts if "${{" in script] == []


def test_the_action_ignores_an_input_that_was_removed_with_a_warning(tmp_path: Path) -> None:
    warning, command = checked(tmp_path, SARIF="out.sarif").splitlines()
    assert warning.startswith("::warning title=fakedist::the input sarif was removed")
    assert "sarif" not in command


def checked(folder: Path, **inputs: str) -> str:
    """The output of the action's check with these inputs; its Python is one that prints its command."""
    (step,) = [step for step in STEPS if step.get("id") == "check"]
    names = ("CONFIG", "JOBS", "JUNIT", "SARIF", "BASE", "FOUND")
    files = {"GITHUB_STEP_SUMMARY": str(folder / "summary"), "GITHUB_OUTPUT": str(folder / "output")}
    known = {"PYTHON": "echo", "FOLDER": ".", "KEPT": str(folder / "kept")}
    environment = {**os.environ, **dict.fromkeys(names, ""), **known, **files, **inputs}
    script = ["bash", "-eo", "pipefail", "-c", step["run"]]
    ran = subprocess.run(script, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout


def test_the_action_runs_the_commit_that_a_pull_request_is_for_and_compares_with_it(tmp_path: Path) -> None:
    repository = tmp_path / "net"
    (repository / "job").mkdir(parents=True)
    (repository / "job/fakedist.toml").write_text("")
    git = ["git", "-c", "user.name=them", "-c", "user.email=them@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"], ["remote", "add", "origin", "."]):
        subprocess.run([*git, *words], cwd=repository, check=True)
    base = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    (repository / "python").write_text(
        '#!/bin/bash\necho "$PWD $PYTHONPATH $*"\nfor ((at = 1; at <= $#; at++)); do if [ "${!at}" = --runs ]; then '
        'next=$((at + 1)); mkdir -p "${!next}/net-rank0"; touch "${!next}/net-rank0/run.json"; fi; done\n'
    )
    (repository / "python").chmod(0o755)
    kept = repository / "kept"
    inputs = {"PYTHON": str(repository / "python"), "FOLDER": "job", "JOBS": "a b", "PYTHONPATH": "/mine"}
    of_base, now = checked(repository, BASE=base.stdout.strip(), **inputs).splitlines()[1::2]
    tree = f"{kept}/base/job"
    assert of_base == f"{tree} {tree}:{tree}/src:/mine -m fakedist check --runs {kept}/runs --no-annotations a b"
    told = f"-m fakedist check --format markdown --output {kept}/report.md --against {kept}/runs a b"
    assert now == f"{repository}/job /mine {told}"
    (again,) = checked(repository, BASE=base.stdout.strip(), FOUND="true", **inputs).splitlines()
    assert again == now, "what a cache had is not run again"
    shutil.rmtree(kept)
    pushed = checked(repository, **inputs)
    assert f"--runs {kept}/runs" in pushed
    assert "--against" not in pushed
