"""Each option of a job is accepted at every door, where it makes the same job."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fakedist
from fakedist import api
from fakedist.check import plugin
from fakedist.check.config import read_config
from fakedist.cli.job_options import jobs_of
from fakedist.cli.profile import profile as profile_command_line
from fakedist.errors import JobError
from fakedist.options import Door, Job, JobOptions, profile_arguments
from fakedist.options.definition import OPTIONS
from fakedist.options.kinds import Option
from fakedist.options.making import option_named
from tools.options_page import markdown

#: Written by hand for each option: what a command line gives for the option's example.
TYPED = {
    "world_size": ["--world-size=1024"],
    "nnodes": ["--nnodes=128"],
    "gpus_per_node": ["--nproc-per-node=4"],
    "rank": ["--rank=3"],
    "launcher": ["--launcher=slurm"],
    "env": ["--env=OMP_NUM_THREADS=4"],
    "nccl_env": ["--nccl-env=NCCL_MAX_NCHANNELS=8"],
    "tapes": ["--tape=/runs/rank0,/runs/rank 4"],
    "with_peers": ["--with-peers"],
    "device": ["--device=cuda"],
    "gpu": ["--gpu=h200"],
    "gpu_memory": ["--gpu-memory=100GiB"],
    "reserve": ["--reserve=3GiB"],
    "host_memory": ["--host-memory=480GiB"],
    "storage": ["--storage=5GB/s"],
    "oom": ["--oom=raise"],
    "gpu_lag": ["--gpu-lag=full"],
    "gpu_power": ["--gpu-power=500W"],
    "fabric": ["--fabric=p5-efa"],
    "host": ["--host=grace"],
    "collectives": ["--collectives=noop"],
    "values": ["--values=strict"],
    "seed": ["--seed=7"],
    "router_load": ["--router-load=zipf:0.5"],
    "steps": ["--steps=3"],
    "until": ["--until=end"],
    "updates_per_step": ["--updates-per-step=8"],
    "timeout": ["--timeout=600"],
    "kernels": ["--no-kernels"],
    "clock_run": ["--clock-run"],
    "times": ["--times=/runs/h100.times.json"],
    "page": ["--no-page"],
    "nsys": ["--nsys"],
    "nsys_args": ["--nsys-args=--trace=cuda,nvtx '--stats=a b'"],
}
#: What each job needs, where the example does not give it; and what an option needs besides itself.
ALWAYS: dict[str, object] = {"world_size": 8, "rank": 1, "device": "virtual"}
NEEDS: dict[str, dict[str, object]] = {"nnodes": {"gpus_per_node": 8}, "nsys_args": {"nsys": True}}


def given(option: Option) -> dict[str, object]:
    always = {key: value for key, value in ALWAYS.items() if not (option.name == "nnodes" and key == "world_size")}
    return {**always, **NEEDS.get(option.name, {}), option.name: option.example}


def typed(arguments: list[str]) -> Job:
    with profile_command_line.make_context("profile", arguments) as context:
        params = dict(context.params)
        (job,) = jobs_of(params.pop("arguments"), params.pop("module"), params)
        return job


def at_the_command_line(option: Option) -> Job:
    values = {name: value for name, value in given(option).items() if name != option.name}
    others = [words for name, value in values.items() for words in _words(name, value)]
    return typed([*others, *TYPED[option.name], "train.py"])


def _words(name: str, value: object) -> list[str]:
    option = option_named(name)
    stored = option.kind.read(value)
    return option.arguments(stored[0] if isinstance(stored, tuple) else stored)


def in_toml(option: Option, directory: Path) -> Job:
    lines = [option_named(name).written(Door.TOML, value) for name, value in given(option).items()]
    lines = [line.replace("ranks = 1", "ranks = [1]") for line in lines]
    text = "\n".join(["[[check.jobs]]", 'name = "job"', 'script = "train.py"', *lines])
    (directory / "fakedist.toml").write_text(text)
    ((job,),) = (each.jobs for each in read_config(directory / "fakedist.toml").jobs)
    return job


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that would have run from Python."""
    jobs: list[Job] = []

    def refuse(job: Job, *others: object) -> None:
        jobs.append(job)
        raise JobError("nothing runs here", "")

    monkeypatch.setattr(api, "run_job", refuse)
    return jobs


def marked(directory: Path, values: dict[str, Any]) -> Any:
    """A test function with the plugin's mark, as far as the plugin looks at it."""
    plugins = SimpleNamespace(get_plugin=lambda name: None)
    config = SimpleNamespace(invocation_params=SimpleNamespace(dir=directory), rootpath=directory, inipath=None)
    config.pluginmanager, config.getoption = plugins, lambda name: "prepend"
    mark = pytest.mark.fakedist(**values).mark
    names = {"name": "test", "nodeid": "test.py::test", "path": directory / "test.py"}
    return SimpleNamespace(**names, config=config, get_closest_marker=lambda name: mark)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_door_accepts_every_option(option: Option, tmp_path: Path, ran: list[Job]) -> None:
    job = at_the_command_line(option)
    values: dict[str, Any] = given(option)
    plain = {**ALWAYS, **NEEDS.get(option.name, {})}
    without = typed([*(word for name, value in plain.items() for word in _words(name, value)), "train.py"])
    assert job != without, "the example does not change the job"
    assert in_toml(option, tmp_path) == job
    with pytest.raises(JobError, match="nothing runs"):
        fakedist.profile("train.py", output=tmp_path / "run", **values)
    assert ran.pop() == job
    with pytest.raises(pytest.fail.Exception, match="nothing runs"):
        plugin.pytest_pyfunc_call(marked(tmp_path, values))
    found = ran.pop()
    inside = (plugin.INSIDE_VARIABLE, "test.py::test")
    assert inside in found.environment
    environment = tuple(pair for pair in found.environment if pair != inside)
    given_to_pytest = {"target": "train.py", "is_module": False, "arguments": ()}
    assert dataclasses.replace(found, environment=environment, **given_to_pytest) == job


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_what_is_to_be_typed_again_has_every_option(option: Option) -> None:
    job = at_the_command_line(option)
    assert typed(profile_arguments(job)) == job


def test_a_module_and_its_arguments_are_typed_again() -> None:
    job = typed(["--world-size=8", "--rank=1", "-m", "package.train", "--seed=9", "a b"])
    assert job.is_module
    assert typed(profile_arguments(job)) == job


def test_pythons_keywords_are_the_options() -> None:
    assert set(JobOptions.__annotations__) | {"world_size", "rank"} == {option.name for option in OPTIONS}


def test_every_option_has_its_own_names() -> None:
    flags = [flag for option in OPTIONS for flag in (*option.flags, option.off_flag) if flag]
    assert len(set(flags)) == len(flags)
    assert all(option.help.endswith(".") for option in OPTIONS)


def test_the_page_of_options_is_as_declared() -> None:
    page = Path(__file__).parents[3] / "docs" / "options.md"
    assert page.read_text() == markdown(), "python -m tools.options_page > docs/options.md"
