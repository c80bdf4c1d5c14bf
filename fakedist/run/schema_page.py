"""docs/run-directory.md, made from the schema."""

from __future__ import annotations

from fakedist.run.schema import MANIFEST, SCHEMA_VERSION, SUMMARY, TABLES

_INTRODUCTION = """# The run directory

`fakedist profile` leaves one directory. Both halves of fakedist know nothing else of each other: what records never
reads it, what reads it never needs torch. `python -m fakedist.run.schema` prints this page; a test keeps it true.

| file | what it is |
|---|---|
| `run.json` | the manifest, below |
| `journal.bin` | what the rank wrote while it ran; the tables are made from it, and after a kill it is all there is |
| `tape.bin` | what the rank sent, for other ranks' runs to receive ([tape.md](tape.md)) |
| `kernels.bin` | the same of what nsys's report says, with `--nsys` |
| `nsight.nsys-rep` | that report, for nsys-ui |
| `tables/*.parquet` | the tables, below |
| `trace.json.gz` | steps, phases, layers, kernels by stream, collectives, the memory counter; for ui.perfetto.dev |
| `report.html` | the report as one page that needs nothing else, not even a network; open it in a browser |
| `memory_snapshot.pickle` | torch's own snapshot format, for pytorch.org/memory_viz |

Bytes and microseconds everywhere. A directory of a newer schema version is refused. A directory is never overwritten
without `--force`, and `--force` replaces nothing but run directories. Tables are made beside the old ones and moved
into place together; nothing is written through a symbolic link.
"""


def markdown() -> str:
    """docs/run-directory.md."""
    lines = [_INTRODUCTION, f"Schema version {SCHEMA_VERSION}.\n"]
    for title, keys in (("run.json", MANIFEST), ("The object of `--json`", SUMMARY)):
        lines += [f"## {title}\n", "| key | meaning |", "|---|---|"]
        lines += [*(f"| `{key}` | {meaning} |" for key, meaning in keys.items()), ""]
    lines.append("## Tables\n")
    for name, table in TABLES.items():
        lines += [f"### {name}\n", f"{table.row}\n", "| column | type | meaning |", "|---|---|---|"]
        lines += [*(f"| `{c.name}` | {c.type} | {c.meaning} |" for c in table.columns), ""]
    return "\n".join(lines).rstrip() + "\n"
