"""Keep one comment on a pull request up to date with a report: what action.yml's last step runs.

    python pull_request_comment.py REPORT.md

It reads the environment of a GitHub Actions job, with GITHUB_TOKEN, and KEY, which tells several reports of one pull
request apart. The comment is found again by a mark in its first line. Where the token may not comment, as on a pull
request from a fork, it says so in one line; the report is in the job's summary. It never fails a job.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

#: GitHub refuses a longer comment than 65,536 characters.
MOST_CHARACTERS = 65_000
_PAGE = 100
_TIMEOUT_S = 30


def main() -> None:
    """Post or update the comment, and print one line."""
    pull = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text())["pull_request"]
    sys.stdout.write(f"{_outcome(pull, Path(sys.argv[1]).read_text())}\n")


def _outcome(pull: dict[str, Any], report: str) -> str:
    try:
        return f"fakedist: {put_comment(pull['number'], report)}"
    except HTTPError as error:
        if error.code not in (401, 403, 404):
            return f"::warning title=fakedist::no comment on the pull request: GitHub answered {error.code}"
    except (URLError, TimeoutError, ValueError) as error:
        return f"::warning title=fakedist::no comment on the pull request: {error}"
    where = "so the report is in the job's summary"
    if (pull["head"]["repo"] or {}).get("full_name") != pull["base"]["repo"]["full_name"]:
        return f"::notice title=fakedist::the token of a pull request from a fork may not comment, {where}"
    return (
        f"::notice title=fakedist::the token may not comment, {where}: give the job permissions: pull-requests: write"
    )


def put_comment(number: int, report: str) -> str:
    """Update the comment of this job on a pull request, or make it. Returns its address.

    Raises:
        HTTPError: GitHub refuses it.
        URLError: GitHub does not answer.
    """
    mark = f"<!-- fakedist {hashlib.sha256(os.environ['KEY'].encode()).hexdigest()[:16]} -->"
    body = f"{mark}\n{_fitting(report)}"
    issues = f"{os.environ['GITHUB_API_URL']}/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    page, comments = 1, [{}]
    while comments:
        comments = _ask("GET", f"{issues}/{number}/comments?per_page={_PAGE}&page={page}")
        for comment in comments:
            # Anyone may write the mark into a comment: only a bot's is ours.
            if comment["body"].startswith(mark) and comment["user"]["type"] == "Bot":
                return str(_ask("PATCH", f"{issues}/comments/{comment['id']}", body)["html_url"])
        page += 1
    return str(_ask("POST", f"{issues}/{number}/comments", body)["html_url"])


def _fitting(report: str) -> str:
    """The report or, of one that is too long, its first pieces: no table and no fold is cut in two."""
    if len(report) <= MOST_CHARACTERS:
        return report
    kept = ""
    for piece in report.split("\n\n"):
        if len(kept) + len(piece) > MOST_CHARACTERS - 200:
            break
        kept += f"{piece}\n\n"
    if kept.count("<details>") > kept.count("</details>"):
        kept = kept[: kept.rindex("<details>")]
    return f"{kept}The rest is too long for a comment; the job's summary has all of it.\n"


def _ask(method: str, address: str, body: str | None = None) -> Any:
    headers = {
        "Authorization": f"Bearer {os.environ['GITHUB_TOKEN']}",
        "Accept": "application/vnd.github+json",
        "Content-Type": "application/json",
    }
    data = None if body is None else json.dumps({"body": body}).encode()
    with urlopen(Request(address, data, headers, method=method), timeout=_TIMEOUT_S) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
