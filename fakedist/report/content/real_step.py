"""Why a real step is slower than the estimate: a trace against a run."""

from __future__ import annotations

import shlex

import pandas as pd

from fakedist.errors import JobError, RunDirectoryError
from fakedist.report.content.report_blocks import (
    KEY,
    Block,
    Fact,
    Facts,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    us_column,
)
from fakedist.report.content.time import group_time_sheet
from fakedist.report.content.wording import source_word
from fakedist.results.compare.against_trace import slower_parts
from fakedist.results.run import Run
from fakedist.results.verdict import timed_step_name
from fakedist.rundir.plain import to_plain
from fakedist.units import format_us

_TITLES = {
    "part": ("The step", "step"),
    "layer": ("By layer, own kernels", "layer"),
    "operation": ("By operation", "operation"),
    "collective": ("By collective, exposed time", "collective"),
    "family": ("By family of kernels", "family of kernels"),
}
_NUM_ROWS = 12
#: An operation below this share of what the step is slower by explains nothing.
_MIN_SHARE = 0.02


def real_step_report(real: Run, run: Run, *, all_rows: bool) -> Report:
    """Compare the step of a trace with a run's, which is estimated or measured."""
    sides = []
    for side in (real, run):
        if side.summary.timed is None:
            hint = "a trace is compared with a run of fakedist profile, without --no-kernels"
            raise RunDirectoryError(f"{side.path} has no timed step to compare", hint)
        sides.append(side.summary.timed)
    tables = slower_parts(real, run)
    names = ("real", "run")
    facts = [
        Fact(name, str(side.path), f"{timed_step_name(side.summary, timed[1].step)}, {source_word(timed[1])}")
        for name, side, timed in zip(names, (real, run), sides, strict=True)
    ]
    gpus = [timed[1].gpu or "unknown" for timed in sides]
    differ = f"the GPUs differ: {gpus[0]} and {gpus[1]}"
    if not sides[0][1].gpu:
        differ = f"the real file does not name its GPU, which may not be the run's: {gpus[1]}"
    remarks = [Remark(differ, is_warning=True)] if gpus[0] != gpus[1] else []
    blocks: list[Block] = [Verdict(_verdict(tables)), Facts(facts), *remarks]
    sheets = [_sheet(*_TITLES[name], table, all_rows=all_rows) for name, table in tables.items()]
    blocks += [sheet for sheet in sheets if sheet.columns[0].cells]
    if "layer" not in tables:
        blocks.append(Remark("no layer has the same name on both sides: operations are compared instead"))

    def data() -> dict[str, object]:
        tables_of = {name: table.to_dict("records") for name, table in tables.items()}
        return {"real": str(real.path), "run": str(run.path), "gpus": gpus, "why": _verdict(tables), **tables_of}

    return Report("compare", blocks, data)


def _verdict(tables: dict[str, pd.DataFrame]) -> str:
    step = tables["part"].iloc[0]
    slower = float(step["slower_us"])
    times = f"{format_us(float(step['real_us']))} against {format_us(float(step['run_us']))}"
    word = "slower" if slower > 0 else "faster"
    text = f"The real step is {format_us(abs(slower))} {word}: {times}"
    waits = tables["part"].set_index("name")["slower_us"].drop(["step", "all kernels", "generation"], errors="ignore")
    if slower > 0 and waits.max() > 0:
        text += f"; {format_us(float(waits.max()))} more: {waits.idxmax()}"
    operations = tables.get("operation")
    if slower > 0 and operations is not None and float(operations["slower_us"].iloc[0]) > _MIN_SHARE * slower:
        first = operations.iloc[0]
        text += f"; of kernels, {first['name']} most, {format_us(float(first['slower_us']))} more"
    return text


def _sheet(title: str, name: str, table: pd.DataFrame, *, all_rows: bool) -> Sheet:
    is_step = (title, name) == _TITLES["part"]
    rows = table if all_rows or is_step else table[table["slower_us"] > 0].head(_NUM_ROWS)
    left = len(table) - len(rows)
    ratios = [real / run if real and run else None for real, run in zip(rows["real_us"], rows["run_us"], strict=True)]
    amounts = [(side, (rows[f"{side}_us"].tolist(), rows[f"num_{side}"].tolist())) for side in ("real", "run")]
    columns = [
        SheetColumn(name, rows["name"].tolist(), is_text=True),
        us_column("real slower by", rows["slower_us"].tolist(), KEY),
        *(us_column(side, [us if us or num else None for us, num in zip(*own, strict=True)]) for side, own in amounts),
        SheetColumn("times", ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios], rank=1),
    ]
    if not is_step:
        columns += [
            SheetColumn("real's kernels", [f"{count:,}" for count in rows["num_real"]], rank=3),
            SheetColumn("run's", [f"{count:,}" for count in rows["num_run"]], rank=4),
        ]
    remarks = [f"not shown: {left} that take no longer, or are minor (--all-rows shows them)"] if left else []
    return Sheet(title, columns, remarks, is_open=True)


def collectives_report(run: Run) -> Report:
    """The collectives of a file of a real GPU, as its tool measured them; JobError if it has none."""
    if run.summary.timed is None or not run.summary.timed[0].by_group:
        hint = f"fakedist report {shlex.quote(str(run.path))} --full   shows what it has"
        raise JobError(f"{run.path} has no collectives", hint)
    time, source = run.summary.timed
    exposed = f"{format_us(sum(row.exposed_us for row in time.by_group))} of collectives while nothing computes"
    return Report(
        "topology",
        [Verdict(exposed, "groups"), group_time_sheet(time, source_word(source))],
        lambda: {"run_directory": str(run.path), "groups": to_plain(time.by_group)},
    )
