"""What was found, as data in docs/accuracy, and the tables of docs/accuracy.md made of it.

python -m tests.accuracy.results      # the tables again, from the data
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "accuracy"
PAGE = ROOT / "docs" / "accuracy.md"
GIB = 1 << 30


def write_result(name: str, rows: Sequence[dict[str, Any]], **about: Any) -> None:
    """Write ``docs/accuracy/<name>.json``: when, with which versions, and the rows."""
    import torch

    device = torch.cuda.get_device_name() if name.endswith("cuda") else "virtual"
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "gpu": device,
        **about,
    }
    DATA.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    (DATA / f"{name}.json").write_text(f'{{"head": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n')


def write_tables() -> None:
    """Put the tables of all data that is there between their marks in docs/accuracy.md."""
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(page: str) -> str:
    """The page with every table made again; one without data says that it is empty."""
    for name, table in TABLES.items():
        path = DATA / f"{name}.json"
        text = table(json.loads(path.read_text())) if path.exists() else "*Empty: never measured.*"
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        page, found = re.subn(pattern, lambda match, text=text: match[1] + text + match[2], page, flags=re.DOTALL)
        assert found == 1, f"{PAGE} has no place for {name}"
    return page


def many_processes(data: dict[str, Any]) -> str:
    """A line for each job and number of ranks: the largest rank's peaks, and the largest difference of any."""
    lines = [
        _head(data),
        "",
        "| job | backend | ranks | allocated, bytes | reserved, bytes | difference | phases | events | cause |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (job, backend, num_ranks), group in groupby(
        data["rows"], key=lambda row: (row["job"], row["backend"], row["num_ranks"])
    ):
        rows = list(group)
        largest = max(rows, key=lambda row: row["real_allocated_bytes"])
        difference = max(
            (row[key] for row in rows for key in ("allocated_difference_bytes", "reserved_difference_bytes")), key=abs
        )
        other = sum(row["first_other_event"] >= 0 for row in rows)
        lines.append(
            f"| {job} | {backend} | {num_ranks} | {largest['real_allocated_bytes']:,} | "
            f"{largest['real_reserved_bytes']:,} | {difference:+,} | {sum(row['phases_differing'] for row in rows)} of "
            f"{sum(row['num_phase_figures'] for row in rows)} | "
            f"{'none of ' + format(sum(row['num_events'] for row in rows), ',') if not other else f'{other} ranks'} | "
            f"{next((row['cause'] for row in rows if row['cause']), '')} |"
        )
    return "\n".join(lines)


def published(data: dict[str, Any]) -> str:
    """A line for each published figure."""
    lines = [
        _head(data),
        "",
        "| job | published | ours, peak reserved | difference | why |",
        "|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        ours = row["reserved_bytes"] / GIB
        difference = f"{100 * (ours / row['published_gib'] - 1):+.1f}%" if ours else "-"
        size = f"{ours:.2f} GiB" if ours else "none"
        lines.append(f"| {row['job']} | {row['published_gib']:.1f} GiB | {size} | {difference} | {row['why']} |")
    return "\n".join(lines)


def _head(data: dict[str, Any]) -> str:
    head = data["head"]
    gpu = "virtual GPU" if head["gpu"] == "virtual" else head["gpu"]
    return f"{head['date']}, {gpu}, torch {head['torch']}, Python {head['python']}:"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "many-processes-virtual": many_processes,
    "many-processes-cuda": many_processes,
    "published": published,
}

if __name__ == "__main__":
    write_tables()
