"""The results of comparisons, as data in docs/accuracy, and the tables of its pages made of it.

    python -m tests.accuracy.results                # the tables again, from the data
    python -m tests.accuracy.results gpu-results    # and what `make gpu` measured, before them
    python -m tests.accuracy.results FILE.json      # a line for what `fakedist confirm` measured, once it was checked

``make gpu`` and ``fakedist confirm`` write the same file. A rehearsal's is marked as one, and has ``"rehearsal": true``
in the head of every table. Neither this module nor a test lets one of them into docs/accuracy.
"""

from __future__ import annotations

import base64
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from fakedist.errors import JobError
from fakedist.extras.confirm.confirming import contradictions, defects, read_confirmation
from fakedist.extras.confirm.pieces import Row
from fakedist.gpu.driver.build import torch_build
from tests.accuracy.tables import GPU_TABLES, TABLES

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "accuracy"
#: The pages with tables between marks: ``<!-- NAME -->`` and ``<!-- end -->``.
PAGES = (DATA / "results.md", DATA / "waiting-for-a-gpu.md")
#: The file of ``make gpu`` in its directory.
RESULTS = "confirmation.json"
EMPTY = "*Empty: never measured.*"
NOTHING = "Nothing has been measured on a GPU: [these tables wait for one](waiting-for-a-gpu.md)."

Match = Callable[[Row], tuple[Any, ...]]


class NotMeasuredError(Exception):
    """A file that does not hold what was measured; in one line."""


def write_rows(path: Path, head: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Write a table's data as JSON, a row on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"head": {json.dumps(head)},\n"rows": [\n{lines}\n]}}\n')


def write_result(name: str, rows: Sequence[Row], *, instead_of: Match | None = None, **about: Any) -> Path:
    """Write ``<name>.json``: when, with which versions, and the rows.

    Args:
        name: A key of ``tables.TABLES`` or ``tables.GPU_TABLES``.
        rows: Plain values.
        instead_of: With it, rows of the existing file stay except those of which it gives what it gives of one
            of ``rows``; they must be of the same torch and GPU. Without it all are replaced.
        about: More of the head; ``gpu``, ``torch`` and ``python`` where they are not this process's.
    """
    head = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch_build()[0],
        "python": platform.python_version(),
        "gpu": "virtual",
        **about,
    }
    path = DATA / f"{name}.json"
    if instead_of is not None and path.exists():
        rows = _merged(json.loads(path.read_text()), head, rows, instead_of)
    write_rows(path, head, rows)
    return path


def same_job(keys: Sequence[str]) -> Match:
    """Rows are of the same job where these columns are equal."""
    return lambda row: tuple(row[key] for key in keys)


def _merged(old: dict[str, Any], head: dict[str, Any], rows: Sequence[Row], match: Match) -> list[Row]:
    for what in ("torch", "gpu"):
        if old["head"][what] != head[what]:
            raise NotMeasuredError(
                f"the rows that are there are of {what} {old['head'][what]}, these of {head[what]}: measure all of them"
            )
    new = {match(row): [each for each in rows if match(each) == match(row)] for row in rows}
    merged: list[Row] = []
    for row in old["rows"]:
        key = match(row)
        merged += new.pop(key, []) if key in new else ([] if key in map(match, rows) else [row])
    return merged + [row for group in new.values() for row in group]


def keep(results: Path) -> list[Path]:
    """Put what ``make gpu`` measured to where it belongs; the files.

    Raises:
        NotMeasuredError: It is a rehearsal, contradicts itself, or has a table that nothing shows.
        JobError: There is nothing that can be read.
    """
    made = read_confirmation(results / RESULTS)
    for name, data in made.tables.items():
        _see_that_it_is_measured(name, data)
    if made.is_rehearsal or (found := list(contradictions(made))):
        why = "the virtual GPU stood in for a real one" if made.is_rehearsal else "; ".join(found[:3])
        raise NotMeasuredError(f"{results} cannot be kept: {why}")
    kept = []
    for name, data in made.tables.items():
        kept.append(DATA / f"{name}.json")
        write_rows(kept[-1], data["head"], data["rows"])
    for name, text in made.recordings.items():
        kept.append(ROOT / "tests" / "data" / "gpu" / name)
        kept[-1].parent.mkdir(parents=True, exist_ok=True)
        kept[-1].write_bytes(base64.b64decode(text))
    return kept


def confirmed(path: Path) -> Path:
    """Add the line of a confirmation to those of others' GPUs; one of the same GPU, driver and torch replaces it.

    Raises:
        NotMeasuredError: It contradicts itself, or lacks a piece.
        JobError: It cannot be read.
    """
    made = read_confirmation(path)
    if found := list(defects(made)):
        raise NotMeasuredError(f"{path} cannot be kept: {'; '.join(found[:3])}")
    rows = made.tables["gpu-recordings"]["rows"]
    kernels = [row for row in made.tables["gpu-estimates"]["rows"] if row["what"] == "total"]
    outside = made.tables["gpu-outside"]["rows"]
    head = made.tables["gpu-recordings"]["head"]
    row = {
        **{key: made.machine[key] for key in ("gpu", "driver", "torch")},
        "date": head["date"],
        "fakedist": made.fakedist,
        "num_jobs": len(rows),
        "same_events": sum(row["virtual_verdict"] in ("same", "order") for row in rows),
        "same_peaks": sum(
            not row["virtual_allocated_difference_bytes"] and not row["virtual_reserved_difference_bytes"]
            for row in rows
        ),
        "kernel_errors": sorted(row["estimated_us"] / row["measured_us"] - 1 for row in kernels),
        "context_bytes": next(row["used_bytes"] - row["reserved_bytes"] for row in outside),
    }
    key = same_job(("gpu", "driver", "torch"))
    kept = DATA / "confirmed.json"
    others = json.loads(kept.read_text())["rows"] if kept.exists() else []
    write_rows(kept, {}, [*(each for each in others if key(each) != key(row)), row])
    return kept


def measured(path: Path) -> dict[str, Any]:
    """Read a file of results.

    Raises:
        NotMeasuredError: It is a rehearsal's, or of no table.
    """
    data: dict[str, Any] = json.loads(path.read_text())
    _see_that_it_is_measured(path.stem, data)
    return data


def _see_that_it_is_measured(name: str, data: Mapping[str, Any]) -> None:
    if data["head"].get("rehearsal"):
        raise NotMeasuredError(f"{name} is a rehearsal: the virtual GPU stood in for a real one")
    if name not in (*TABLES, *GPU_TABLES):
        raise NotMeasuredError(f"there is no table {name}")


def write_tables() -> None:
    """Put the tables of all existing data between their marks."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


def with_tables(page: str) -> str:
    """The text of a page with every table rebuilt."""
    made = {name: _table(name) for name in TABLES} | {"on-a-gpu": _on_a_gpu(), "waiting-for-a-gpu": _waiting()}
    made["confirmed"] = _confirmed()

    def rebuilt(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", rebuilt, page, flags=re.DOTALL)


def _table(name: str) -> str:
    path = DATA / f"{name}.json"
    return TABLES[name](measured(path)) if path.exists() else EMPTY


def _on_a_gpu() -> str:
    found = [
        f"### {each.title}\n\n{each.shows}\n\n{each.table(measured(DATA / f'{name}.json'))}"
        for name, each in GPU_TABLES.items()
        if (DATA / f"{name}.json").exists()
    ]
    return "\n\n".join(found or [NOTHING])


def _confirmed() -> str:
    path = DATA / "confirmed.json"
    if not path.exists():
        return "*Empty: none has been sent yet.*"
    lines = []
    for row in json.loads(path.read_text())["rows"]:
        least, *_, most = errors = row["kernel_errors"]
        cells = [row[key] for key in ("gpu", "driver", "torch", "date")]
        cells += [f"{row[key]} of {row['num_jobs']}" for key in ("same_peaks", "same_events")]
        cells += [f"{median(errors):+.0%} ({least:+.0%} to {most:+.0%})", f"{row['context_bytes']:,}"]
        lines.append(f"| {' | '.join(cells)} |")
    columns = "GPU | driver | torch | date | same peaks | same events | kernels of a step, estimated | context, bytes"
    return "\n".join([f"| {columns} |", "|---" * 8 + "|", *lines])


def _waiting() -> str:
    rows = [
        f'| {each.title} | {each.shows} | `make gpu PIECES="{each.piece}"` |'
        for name, each in GPU_TABLES.items()
        if not (DATA / f"{name}.json").exists()
    ]
    return "\n".join(["| table | figures | command |", "|---|---|---|", *rows]) if rows else "Every table is filled."


def main(arguments: Sequence[str]) -> int:
    try:
        for argument in map(Path, arguments):
            print(*([confirmed(argument)] if argument.is_file() else keep(argument)), sep="\n")
    except (NotMeasuredError, JobError) as error:
        print(error, file=sys.stderr)
        return 1
    write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
