"""``fakedist mcp``, spoken to by the package's own client over stdio: what an agent does, and may not do."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

anyio = pytest.importorskip("anyio", reason="the extra mcp is not installed")
mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

from fakedist.cli import main  # noqa: E402
from fakedist.extras.mcp.command import COMMAND  # noqa: E402
from fakedist.extras.mcp.server import fitting  # noqa: E402
from tests.conftest import clean_environment  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

#: A model whose activations grow with the batch, and which writes to stdout as scripts do.
JOB = """
import sys
import torch
from torch import nn

batch = int(sys.argv[1])
print("the script's own words", flush=True)
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(batch, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
READING = {"runs", "report", "explain", "lines", "time", "compare", "match", "doctor"}
Story = Callable[[Any], Awaitable[None]]


def tell(story: Story, project: Path, *options: str) -> None:
    """Run a story with a client of ``fakedist mcp`` in a project."""
    words = ["-m", "fakedist", "mcp", "--project", str(project), *options]
    server = mcp.StdioServerParameters(command=sys.executable, args=words, env=clean_environment(), cwd=project.parent)

    async def run() -> None:
        with (project.parent / "server.txt").open("w") as said:
            async with mcp.Client(mcp.stdio_client(server, said)) as client:
                await story(client)

    anyio.run(run)


def answer(result: Any) -> dict[str, Any]:
    """The object that a tool answered."""
    assert not result.is_error, result.content
    loaded = result.structured_content
    assert isinstance(loaded, dict)
    return loaded


def refusal(result: Any) -> str:
    assert result.is_error, result.content
    return str(result.content[0].text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(JOB)
    (tmp_path / "secret.txt").write_text("not for agents")
    (folder / "away").symlink_to(tmp_path)
    return folder


@pytest.mark.long
def test_an_agent_finds_out_why_a_job_does_not_fit_and_proves_its_change(project: Path) -> None:
    async def story(client: Any) -> None:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == READING | {"profile", "sweep", "check"}
        job = {"script": "train.py", "world_size": 8, "gpu_memory": "1GiB"}
        large = answer(await client.call_tool("profile", job | {"arguments": ["40000"], "output": "large"}))
        assert (large["exit"], large["data"]["fits"]) == (4, False)
        assert large["data"]["peak_allocated_bytes"] > 1 << 30
        printed = Path(large["output"])
        assert printed.is_relative_to(project.resolve() / ".fakedist")
        assert "the script's own words" in printed.read_text()

        why = answer(await client.call_tool("report", {"run": "large", "section": "by_category"}))
        assert max(why["data"], key=why["data"].get) in ("activation", "temporary")
        assert why["not_known"]
        lines = answer(await client.call_tool("lines", {"run": "large", "section": "lines"}))["data"]
        assert max(lines, key=lambda line: line["allocated_bytes"])["line"] == 11

        small = answer(await client.call_tool("profile", job | {"arguments": ["4000"], "output": "small"}))
        assert small["data"]["fits"] is True
        assert "exit" not in small
        proof = answer(await client.call_tool("compare", {"before": "large", "after": "small"}))
        assert proof["command"].startswith("fakedist compare ")
        assert str(small["data"]["peak_allocated_bytes"]) in json.dumps(proof["data"])
        listed = answer(await client.call_tool("runs", {}))["data"]["runs"]
        assert [Path(run["path"]).name for run in listed] == ["small", "large"]
        elsewhere = answer(await client.call_tool("time", {"run": "small", "gpu": "h100-80g,b200"}))
        assert "b200" in json.dumps(elsewhere).lower()

        again = await client.call_tool("profile", job | {"arguments": ["4000"], "output": "small"})
        assert "already" in refusal(again), "nothing is replaced"

    tell(story, project, "--allow-run")


@pytest.mark.long
def test_an_agent_sweeps_a_space_and_checks_the_projects_budgets(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        "[[tool.fakedist.check.jobs]]\nname = 'small'\nscript = 'train.py'\narguments = ['400']\nworld_size = 8\n"
        "budgets = { peak_allocated = '1 MiB' }\n"
    )

    async def story(client: Any) -> None:
        space = {"script": "train.py", "world_size": 8, "axes": ["batch=400,800"], "arguments": ["{batch}"]}
        swept = answer(await client.call_tool("sweep", space))
        assert ".fakedist/sweep-" in json.dumps(swept["data"])
        assert len(swept["data"]["points"]) == 2
        checked = answer(await client.call_tool("check", {"jobs": ["small"]}))
        assert checked["exit"] == 3
        assert "outside of the project" in refusal(await client.call_tool("check", {"config": "../pyproject.toml"}))
        assert "is not a name" in refusal(await client.call_tool("check", {"jobs": ["--update"]}))

    tell(story, project, "--allow-run")


def test_without_leave_nothing_runs_and_no_path_leads_out_of_the_project(project: Path) -> None:
    (project / "json.py").write_text("open('ran', 'w')")

    async def story(client: Any) -> None:
        assert {tool.name for tool in (await client.list_tools()).tools} == READING
        assert "profile" in refusal(await client.call_tool("profile", {"script": "train.py", "world_size": 8}))
        away = dict.fromkeys(("..", "/etc/passwd", "away/secret.txt", "away"), "is outside of the project")
        for path, told in (away | dict.fromkeys(("--help", "a\0b", "a" * 5_000), "does not exist")).items():
            assert told in refusal(await client.call_tool("report", {"run": path}))
        (project / "mine.toml").symlink_to(project.parent / "secret.txt")
        for gpu in ("--help", "../other.toml", "h100,mine.toml"):
            assert refusal(await client.call_tool("time", {"run": "train.py", "gpu": gpu}))
        assert answer(await client.call_tool("runs", {}))["data"]["runs"] == []
        assert "FD101: chunks of a loss" in answer(await client.call_tool("explain", {"code": "fd101"}))["data"]
        assert "there is no rule 'FD999'" in refusal(await client.call_tool("explain", {"code": "FD999"}))
        assert "findings" in answer(await client.call_tool("doctor", {}))["data"]

    tell(story, project)
    left = sorted(path.name for path in project.iterdir())
    assert left == ["away", "json.py", "mine.toml", "train.py"], "reading runs and writes nothing"


@pytest.mark.parametrize("link", [".fakedist", ".fakedist/sweep-train"])
def test_no_tool_writes_through_a_symlink_that_leads_out_of_the_project(project: Path, link: str) -> None:
    away = project.parent / "elsewhere"
    away.mkdir()
    (project / link).parent.mkdir(exist_ok=True)
    (project / link).symlink_to(away)

    async def story(client: Any) -> None:
        space = {"script": "train.py", "world_size": 8, "axes": ["batch=400"], "arguments": ["{batch}"]}
        assert "is outside of the project" in refusal(await client.call_tool("sweep", space))

    tell(story, project, "--allow-run")
    assert list(away.iterdir()) == []


@pytest.mark.long
def test_a_long_run_reports_its_progress_and_ends_when_it_is_cancelled(project: Path) -> None:
    (project / "train.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nprint('begun', flush=True)\ntime.sleep(600)\n"
    )
    heard: list[tuple[float, str | None]] = []

    async def story(client: Any) -> None:
        with anyio.CancelScope() as scope:

            async def listen(progress: float, total: float | None, message: str | None) -> None:
                heard.append((progress, message))
                if (project / "pid").exists() and (project / "pid").read_text():
                    scope.cancel()

            await client.call_tool("profile", {"script": "train.py", "world_size": 2}, progress_callback=listen)
        assert scope.cancelled_caught
        assert not await _runs_on(int((project / "pid").read_text()))
        assert answer(await client.call_tool("doctor", {})), "the server goes on"

    tell(story, project, "--allow-run")
    seconds = [progress for progress, _ in heard]
    assert seconds == sorted(set(seconds))


async def _runs_on(pid: int) -> bool:
    """Return whether a process still runs after the time that it gets to end."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        await anyio.sleep(0.1)
    return True


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "limit", "words"),
    [("--time-limit", "1", "it took longer than 1 s"), ("--memory-limit", "20MiB", "it held more than 20.00 MiB")],
)
def test_a_tool_that_exceeds_a_limit_is_ended(project: Path, option: str, limit: str, words: str) -> None:
    (project / "train.py").write_text("import time\ntime.sleep(600)\n")

    async def story(client: Any) -> None:
        refused = refusal(await client.call_tool("profile", {"script": "train.py", "world_size": 2}))
        assert words in refused
        assert f"fakedist mcp {option} " in refused

    tell(story, project, "--allow-run", option, limit)


def test_the_settings_for_agents_are_read_and_start_the_command(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/mcp.md").read_text()
    (toml,), (text,) = (re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL) for kind in ("toml", "json"))
    settings = [tomllib.loads(toml)["mcp_servers"]["fakedist"], json.loads(text)["mcpServers"]["fakedist"]]
    for server in settings:
        program, (command, *options) = server["command"], server["args"]
        assert (program, command, options[:-1]) == ("fakedist", "mcp", ["--project"])
        COMMAND.make_context("mcp", [*options[:-1], str(tmp_path), "--allow-run"])
    assert settings[0]["tool_timeout_sec"] == 1800
    assert re.search(r"^claude mcp add fakedist -- fakedist mcp --project ", page, flags=re.MULTILINE)


def test_a_large_answer_has_small_parts_and_names_the_others() -> None:
    rows = [{"name": f"layers.{number}", "bytes": number} for number in range(5_000)]
    assert fitting({"fits": True}) == {"data": {"fits": True}}
    cut = fitting({"fits": True, "layers": rows}, "memory")
    assert cut == {"data": {"fits": True}, "sections": {"memory.layers": len(json.dumps(rows))}}
    first = fitting(rows)
    assert first["data"] == rows[: len(first["data"])]
    assert first["rows_left_out"] == len(rows) - len(first["data"])
    assert 15_000 < len(json.dumps(first["data"])) <= 20_000


def test_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fakedist.extras.mcp.command.find_spec", lambda name: None)
    assert main(["mcp"]) == 1
    assert "pip install 'fakedist[mcp]'" in capsys.readouterr().err
