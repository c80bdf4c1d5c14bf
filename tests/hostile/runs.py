"""Run directories that were damaged, or made to harm: each changes a good one."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.hostile.snapshots import ESCAPES, Runs

Change = Callable[[Path], object]


def manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the values of run.json."""

    def apply(run: Path) -> None:
        values = json.loads((run / "run.json").read_text())
        change(values)
        (run / "run.json").write_text(json.dumps(values))

    return apply


def table(name: str, change: Callable[[Any], Any]) -> Change:
    """Change a table, a ``pyarrow.Table``."""

    def apply(run: Path) -> None:
        path = run / "tables" / f"{name}.parquet"
        pq.write_table(change(pq.read_table(path)), path, store_schema=False)

    return apply


def column(name: str, of: str, values: Callable[[int], Any]) -> Change:
    """Replace a column, by the number of rows."""

    def replaced(found: Any) -> Any:
        return found.set_column(found.schema.get_field_index(of), of, values(found.num_rows))

    return table(name, replaced)


def text(content: str | bytes) -> Change:
    """Replace run.json."""
    return lambda run: (run / "run.json").write_bytes(content if isinstance(content, bytes) else content.encode())


def link(name: str, target: str) -> Change:
    """Replace a file by a symbolic link."""

    def apply(run: Path) -> None:
        (run / name).unlink()
        (run / name).symlink_to(target)

    return apply


def pipe(name: str) -> Change:
    """Replace a file by a pipe without a writer."""

    def apply(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return apply


def journal(content: bytes | None) -> Change:
    """Replace the journal, and leave the summary out, so that it is read."""

    def apply(run: Path) -> None:
        manifest(lambda values: values.pop("summary"))(run)
        (run / "journal.bin").unlink()
        if content is not None:
            (run / "journal.bin").write_bytes(content)

    return apply


def records(*values: object) -> bytes:
    """A journal of these pickles."""
    found = b"FDJ1"
    for value in values:
        body = pickle.dumps(value)
        found += struct.pack("<II", len(body), zlib.crc32(body)) + body
    return found


def figures(**changed: Any) -> Change:
    """Change figures of the summary."""
    return manifest(lambda values: values["summary"].update(changed))


#: Change, and a part of the one line that is said of it.
REFUSED: dict[str, tuple[Change, str]] = {
    "job: null": (manifest(lambda values: values.update(job=None)), "job is missing"),
    "job: {}": (manifest(lambda values: values.update(job={})), "job.world_size is missing"),
    "summary: {}": (manifest(lambda values: values.update(summary={})), "summary.world_size is missing"),
    "summary: []": (manifest(lambda values: values.update(summary=[1])), "summary is '[1]', not an object"),
    "text for a number": (figures(peak_allocated_bytes="12"), "peak_allocated_bytes is '12', not an integer"),
    "NaN": (figures(peak_allocated_bytes=float("nan")), "peak_allocated_bytes is 'nan', not an integer"),
    "endless power": (manifest(lambda values: values["job"].update(timeout_s=float("inf"))), "timeout"),
    "huge number": (figures(peak_allocated_bytes=10**400), "is a number of 1,329 bits"),
    "number of 100,000 digits": (text('{"schema_version":1,"job":' + "9" * 100_000 + "}"), "4300 digits"),
    "200,000 brackets": (text("[" * 200_000 + "]" * 200_000), "nested too deeply"),
    "not UTF-8": (text(b'\xff\xfe{"schema_version":1}'), "can't decode"),
    "no JSON": (text(""), "Expecting value"),
    "newer": (manifest(lambda values: values.update(schema_version=99)), "schema version 99"),
    "pipe": (pipe("run.json"), "it is a pipe, not a file"),
    "device": (link("run.json", "/dev/zero"), "it is a device, not a file"),
    "no tables": (lambda run: shutil.rmtree(run / "tables"), "has no table"),
    "no table": (lambda run: (run / "tables/layers.parquet").unlink(), "has no table layers"),
    "table cut off": (
        lambda run: os.truncate(run / "tables/layers.parquet", 500),
        "layers.parquet cannot be read",
    ),
    "pipe for a table": (pipe("tables/layers.parquet"), "layers.parquet cannot be read: it is a pipe"),
    "other columns": (table("layers", lambda _: pa.table({"a": [1, 2]})), "it has no column name"),
    "text for bytes": (
        column("layers", "most_own_bytes", lambda num: pa.array(["x"] * num)),
        "column most_own_bytes is of type string, not int64",
    ),
    "values missing": (
        column("layers", "most_own_bytes", lambda num: pa.array([None] * num, pa.int64())),
        "column most_own_bytes has no value in",
    ),
    "layer out of range": (
        column("blocks", "layer", lambda num: pa.array([10**6] * num, pa.int32())),
        "column layer names row 1,000,000 of layers",
    ),
    "layer of itself": (
        column("layers", "parent", lambda num: pa.array([-1, *range(1, num)], pa.int32())),
        "a row of layers that comes later",
    ),
    "frame out of range": (
        column("stacks", "frames", lambda num: pa.array([[7000]] * num, pa.list_(pa.int32()))),
        "column frames names row 7,000 of frames",
    ),
    "unknown category": (
        column("blocks", "category", lambda num: pa.array(["magic"] * num)),
        "column category has the unknown word 'magic'",
    ),
    "a million rows in no bytes": (
        table("events", lambda found: pa.concat_tables([found.slice(0, 1)] * 1_000_000).combine_chunks()),
        "it claims 1,000,000 rows in",
    ),
    "journal is garbage": (journal(b"FDJ1garbage" * 10), "journal.bin"),
    "journal is missing": (journal(None), "journal.bin is missing"),
    "journal is empty": (journal(b""), "journal.bin holds no record"),
    "journal calls": (journal(records({"kind": Runs(os.system, ("touch PWNED",))})), "wants to load posix.system"),
    "journal of wrong types": (journal(records({"kind": "gpu"}, {"kind": "events"})), "a record 'events' that is not"),
    "journal without kinds": (journal(records(7)), "is not a journal of fakedist"),
}


def escapes(run: Path) -> None:
    """Put what steers a terminal into every text that run.json and the tables have room for."""

    plain = ESCAPES.encode(errors="ignore").decode()

    def values(found: dict[str, Any]) -> None:
        summary = found["summary"]
        found["job"]["arguments"] = [ESCAPES, "[bold]"]
        found["cwd"] = "/" + ESCAPES
        summary["gpu"] = summary["torch"] = summary["exit"]["message"] = ESCAPES
        summary["notes"] = [{"code": "x", "text": ESCAPES}]
        for named in (summary["layers"], summary["by_phase"]):
            for row in named:
                row["name" if "name" in row else "phase"] = ESCAPES
        for row in summary["collectives"]:
            row["group"] = row["operation"] = plain
        for row in summary["largest_blocks"]:
            row["line"] = row["operation"] = row["layer"] = ESCAPES
        for row in summary["advice"]:
            row["title"] = row["text"] = row["rule"] = ESCAPES

    manifest(values)(run)
    texts = {"layers": ("name", "class_name"), "groups": ("name", "description", "backend"), "stacks": ("line",)}
    for name, columns in texts.items():
        for each in columns:
            column(name, each, lambda num: pa.array([f"{plain}{number}" for number in range(num)]))(run)
    column("calls", "operation", lambda num: pa.array([plain] * num))(run)
    column("collectives", "operation", lambda num: pa.array([plain] * num))(run)
