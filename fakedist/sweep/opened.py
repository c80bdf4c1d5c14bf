"""A sweep: its rows as a DataFrame, and its ranking. ``fakedist.open_sweep`` returns one."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pandas as pd

from fakedist.errors import SweepError
from fakedist.report.content.run_list import ListedRun, size_of
from fakedist.rundir.directory import HOME
from fakedist.rundir.plain import to_plain
from fakedist.sweep.point_rows import Row, Status
from fakedist.sweep.ranking import Ranking, rank_rows, sentences
from fakedist.sweep.space import COLUMNS, text_of
from fakedist.sweep.sweep_directory import (
    ABOUT_NAME,
    JOURNAL_NAME,
    RUN_AGAIN,
    TABLE_NAME,
    About,
    read_about,
    read_known,
)
from fakedist.temporary import replacing
from fakedist.visible import MOST_OF_A_TEXT, visible


class Sweep:
    """A sweep, finished or not. Rows are in the order of the points."""

    def __init__(self, path: Path, about: About, rows: Sequence[Row]) -> None:
        self.path, self.about, self.rows = path, about, list(rows)
        self.ranking: Ranking = rank_rows(self.rows, about.headroom)

    @property
    def varied_axes(self) -> list[str]:
        """The axes with several values, those that matter most first."""
        order = [effect.axis for effect in self.ranking.effects]
        names = [name for name, values in self.about.axes.items() if len(values) > 1]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def frame(self) -> pd.DataFrame:
        """A row for each point, in the order of the points: the values of the axes, then ``COLUMNS``.

        Bytes and microseconds. Memory is that of the rank that leaves least of its GPU free; ``stages`` has every rank
        that ran. What is not known is missing.
        """
        ranks = {entry.row.id: entry.place for entry in self.ranking.ranked}
        made = [_flat(row, ranks.get(row.id), row.id in self.ranking.front) for row in self.rows]
        frame = pd.DataFrame(made, columns=[*self.about.axes, *COLUMNS])
        for name in self.about.axes:
            if frame[name].map(type).nunique() > 1:
                frame[name] = frame[name].map(text_of)
        whole = ("place", "tokens_per_step", "samples_per_step", *(name for name in COLUMNS if name.endswith("_bytes")))
        return frame.astype(dict.fromkeys(whole, "Int64"))

    def write_table(self) -> Path:
        """Write the rows into ``sweep.parquet``. ``stages`` becomes JSON."""
        path = self.path / TABLE_NAME
        frame = self.frame()
        frame["stages"] = frame["stages"].map(json.dumps)
        frame["ranks"] = frame["ranks"].map(lambda ranks: ",".join(map(str, ranks)))
        with replacing(path) as fresh:
            frame.to_parquet(fresh, index=False)
        return path

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}({str(self.path)!r})", *sentences(self.ranking)]
        return "\n  ".join(lines)


def open_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Open the directory of a sweep, also of one that was killed or still runs.

    Raises:
        SweepError: It is not the directory of a sweep, or is damaged.
    """
    directory = Path(path)
    about, journal = read_about(directory), directory / JOURNAL_NAME
    known = read_known(journal).rows
    texts = {name: {text_of(value) for value in values} for name, values in about.axes.items()}
    if about.points is None:  # a sampler's earlier sweep, of other axes, left rows too
        return Sweep(directory.resolve(), about, [row for row in known.values() if _is_on(row, texts)])
    rows = [known[row_id] for row_id in about.points if row_id in known]
    if (wrong := next((row for row in rows if not _is_on(row, texts)), None)) is not None:
        label = visible(wrong.label, MOST_OF_A_TEXT)
        raise SweepError(f"{journal} has a row for {label}, which is not a point of {ABOUT_NAME}", RUN_AGAIN)
    return Sweep(directory.resolve(), about, rows)


def list_sweeps() -> list[ListedRun]:
    """Every sweep in the current directory and in ``.fakedist/``."""
    return [_listed(path.parent) for folder in (HOME, Path()) for path in folder.glob(f"*/{ABOUT_NAME}")]


def _listed(path: Path) -> ListedRun:
    job, verdict = "a sweep", "cannot be read"
    with suppress(SweepError):
        sweep = open_sweep(path)
        job = f"sweep of {Path(sweep.about.program).name}"
        verdict = f"{sum(row.status is Status.FITS for row in sweep.rows)} of {len(sweep.rows)} points fit"
    begun = datetime.fromtimestamp((path / ABOUT_NAME).stat().st_mtime).astimezone()
    return ListedRun(path=path, created=begun, job=job, verdict=verdict, size_bytes=size_of(path), kept="a sweep")


def _is_on(row: Row, axes: Mapping[str, Container[str]]) -> bool:
    """True if a row has one value of each axis."""
    is_named = sorted(name for name, _ in row.values) == sorted(axes)
    return is_named and all(text_of(value) in axes[name] for name, value in row.values)


def _flat(row: Row, place: int | None, on_front: bool) -> dict[str, object]:
    fullest, step = row.fullest, row.step
    cells: dict[str, object] = dict(row.values)
    cells |= {"id": row.id, "status": str(row.status), "place": place, "on_front": on_front}
    cells |= {"reason": row.reason, "layer": row.layer, "line": row.line}
    if fullest is not None:
        cells |= {name: value for name, value in asdict(fullest).items() if name in COLUMNS}
        cells |= {"total_bytes": fullest.total_bytes, "headroom_bytes": row.headroom_bytes}
    if step is not None:
        cells |= {name: value for name, value in asdict(step).items() if name in COLUMNS}
        cells |= {"step_low_us": step.low_us, "step_high_us": step.high_us}
        cells |= {"priced_gpu": step.gpu, "priced_fabric": step.fabric}
    cells |= {"ranks": [result.rank for result in row.ranks], "has_every_stage": row.has_every_stage}
    cells |= {"stages": to_plain(row.ranks), "is_check": row.is_check, "run": row.run_directory, "reason": row.reason}
    cells |= {"layer": row.layer, "line": row.line}
    cells |= {"host": ",".join(dict.fromkeys(result.host for result in row.ranks))}
    cells |= {"worker": ",".join(dict.fromkeys(result.worker for result in row.ranks))}
    cells["wall_s"] = sum(result.wall_s for result in row.ranks)
    cells["peak_rss_bytes"] = max((result.peak_rss_bytes for result in row.ranks), default=None)
    return cells
