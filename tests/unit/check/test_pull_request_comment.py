"""The last step of action.yml on a pull request: one comment that is updated, and a line where the token may not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "tools/pull_request_comment.py"


class GitHub(HTTPServer):
    """The part of GitHub's REST API that has a pull request's comments. ``refuses`` is its answer to every change."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.comments: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.refuses = 0

    def add(self, body: str, kind: str = "Bot") -> None:
        self.comments.append({"id": len(self.comments), "body": body, "user": {"type": kind}, "html_url": "there"})


class _Answer(BaseHTTPRequestHandler):
    server: GitHub

    def do_GET(self) -> None:
        match = re.fullmatch(r"/repos/them/net/issues/7/comments\?per_page=(\d+)&page=(\d+)", self.path)
        assert match is not None, self.path
        size, page = map(int, match.groups())
        self._answer(200, self.server.comments[(page - 1) * size : page * size])

    def do_POST(self) -> None:
        assert self.path == "/repos/them/net/issues/7/comments"
        self._change(lambda body: self.server.add(body))

    def do_PATCH(self) -> None:
        comment = self.server.comments[int(self.path.removeprefix("/repos/them/net/issues/comments/"))]
        self._change(lambda body: comment.update(body=body))

    def _change(self, change: Any) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["body"]
        assert self.headers["Authorization"] == "Bearer a token"
        if not self.server.refuses:
            change(body)
        self._answer(self.server.refuses or 200, {"html_url": "there"})

    def _answer(self, code: int, value: Any) -> None:
        self.server.asked.append(f"{self.command} {code}")
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture
def github() -> Iterator[GitHub]:
    server = GitHub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def comment(github: GitHub, folder: Path, report: str, *, key: str = "test check", head: str = "them/net") -> str:
    (folder / "report.md").write_text(report)
    pull = {"number": 7, "head": {"repo": {"full_name": head}}, "base": {"repo": {"full_name": "them/net"}}}
    (folder / "event.json").write_text(json.dumps({"pull_request": pull}))
    environment = os.environ | {
        "GITHUB_API_URL": f"http://127.0.0.1:{github.server_port}",
        "GITHUB_REPOSITORY": "them/net",
        "GITHUB_EVENT_PATH": str(folder / "event.json"),
        "GITHUB_TOKEN": "a token",
        "KEY": key,
    }
    words = [sys.executable, str(SCRIPT), str(folder / "report.md")]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_a_second_push_updates_the_comment_of_the_first(github: GitHub, tmp_path: Path) -> None:
    for number in range(120):  # two pages of other comments, one of which quotes ours
        github.add(f"comment {number}", "User")
    assert comment(github, tmp_path, "first") == "fakedist: there"
    mark, _, body = github.comments[-1]["body"].partition("\n")
    assert body == "first"
    github.add(f"{mark}\nof a stranger", "User")
    comment(github, tmp_path, "second")
    bodies = [one["body"] for one in github.comments]
    assert (len(bodies), bodies[120], bodies[121]) == (122, f"{mark}\nsecond", f"{mark}\nof a stranger")
    assert github.asked[-1] == "PATCH 200"


def test_two_jobs_of_one_pull_request_have_a_comment_each(github: GitHub, tmp_path: Path) -> None:
    comment(github, tmp_path, "one", key="test check one")
    comment(github, tmp_path, "two", key="test check two")
    assert len(github.comments) == 2


@pytest.mark.parametrize(
    ("refuses", "head", "said"),
    [
        (403, "someone/net", "::notice title=fakedist::the token of a pull request from a fork may not comment"),
        (403, "them/net", "pull-requests: write"),
        (500, "them/net", "::warning title=fakedist::no comment on the pull request: GitHub answered 500"),
    ],
)
def test_a_refusal_is_one_line_and_no_failure(
    github: GitHub, tmp_path: Path, refuses: int, head: str, said: str
) -> None:
    github.refuses = refuses
    (line,) = comment(github, tmp_path, "report", head=head).splitlines()
    assert said in line
    assert github.comments == []


def test_a_report_that_is_too_long_ends_with_a_whole_table(github: GitHub, tmp_path: Path) -> None:
    table = "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 2_000
    comment(
        github,
        tmp_path,
        "\n\n".join(["**verdict**", *[f"<details>\n<summary>t</summary>\n\n{table}\n\n</details>"] * 9]),
    )
    body = github.comments[-1]["body"]
    assert 30_000 < len(body) < 65_536
    assert body.count("<details>") == body.count("</details>") > 0
    assert body.endswith("The rest is too long for a comment; the job's summary has all of it.\n")
