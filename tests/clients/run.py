"""``python -m tests.clients.run``: run the jobs of the catalogue and write docs/clients.md from what they did."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.clients.catalogue import ENTRIES, Entry, projects
from tests.clients.running import LONGER, Ran, WrongRunError, run_rank, run_together
from tests.clients.table import load_results, result_of, save_results


def main() -> int:
    """Run what the options choose; 1 when a job did not do what the catalogue says."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.run", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="only those that CI runs")
    parser.add_argument("--new", action="store_true", help="only those without a result")
    parser.add_argument("--projects", action="store_true", help="only those with an environment of their own")
    parser.add_argument("--only", metavar="TEXT", help="only those with TEXT in their name")
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    parser.add_argument("--render", action="store_true", help="write the document from the results, run nothing")
    options = parser.parse_args()
    results = load_results()
    chosen = [
        entry
        for entry in ENTRIES
        if (entry.fast or not options.fast)
        and (entry in projects.ENTRIES or not options.projects)
        and (options.only or "").lower() in entry.name.lower()
        and not (options.new and entry.name in results)
    ]
    if options.render:
        save_results(results, ENTRIES)
        return 0
    if options.list or not chosen:
        print("\n".join(entry.name for entry in chosen) or "no such entry; --list names them")
        return 0 if chosen else 2
    return max(_run_and_save(entry) for entry in chosen)


def _run_and_save(entry: Entry) -> int:
    if entry.missing:
        print(f"-- {entry.name}: not installed: {', '.join(entry.missing)}; its last result stays", flush=True)
        return 0
    runs: list[Ran] = []
    failed = ""
    with tempfile.TemporaryDirectory(prefix="fakedist-clients-") as directory:
        try:
            for rank, run in zip(entry.ranks, _ranks(entry, Path(directory)), strict=True):
                runs.append(run)
                said = "refused" if entry.refused else "ok"
                print(f"{said} {entry.name}, rank {rank}: {run.wall_s:.1f} s", flush=True)
        except WrongRunError as error:
            print(error, file=sys.stderr)
            failed = str(error).splitlines()[0].removeprefix(f"{entry.name}, ")
    if os.environ.get(LONGER):
        return int(bool(failed))
    # Read again: several may run at once.
    save_results(load_results() | {entry.name: result_of(entry, runs, failed)}, ENTRIES)
    return int(bool(failed))


def _ranks(entry: Entry, directory: Path) -> Iterator[Ran]:
    if entry.together:
        yield from run_together(entry, directory)
        return
    tapes: list[Path] = []
    for rank in entry.ranks:
        place = directory / f"rank{rank}"
        run = run_rank(entry, rank, place, tapes)
        yield run
        if entry.taped:
            tapes.append(run.directory)
        else:
            shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
