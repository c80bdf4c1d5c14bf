"""docs/truth.md and its picture, made of the catalogue and the results."""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import plotly.graph_objects as go

from fakedist.report.figures.look import GROUP_COLOURS, INK, LINE, MUTED, PANEL
from fakedist.report.page.assets import plotly_text
from fakedist.units import GIB, MIB
from tests.truth.catalogue import (
    BYTES_NEED_CAUSE,
    TIME_NEEDS_CAUSE,
    WORKSPACE_BYTES,
    Made,
    Pair,
    Peak,
    Results,
    Row,
    Step,
    catalogue,
    our_bytes,
    published_bytes,
)
from tests.truth.jobs import ROOT

PAGE, PICTURE = ROOT / "docs" / "truth.md", ROOT / "docs" / "images" / "truth.svg"
#: The goals, over rows that no parameter was fitted on: of bytes, and of steps.
BYTES_WITHIN, BYTES_SHARE = 0.002, 0.9
STEP_MEDIAN, STEP_WITHIN, STEP_SHARE, INSIDE = 0.06, 0.15, 0.9, (0.85, 0.95)
PAIR_MEDIAN, PAIR_WITHIN = 0.03, 0.1
NOT_KNOWN = "**not known**"
_HEAD = """\
<!-- Made of tests/truth/catalogue.toml and tests/truth/results.json by `make truth`: edit those. -->
# Published peaks and steps, rebuilt

Each row compares the memory or the step that others published of a job on real GPUs with what fakedist computes without
a GPU.
`make truth ONLY="gpt-7b-*" ARGS="--again --record"` reruns rows by name
([how](accuracy/method.md#published-peaks-and-steps)). Peaks are *measured* by the allocator, steps *estimated* with a
90 % interval.
"""
_PEAKS = """\
The allocated peak on one rank, from the second iteration on. {workspaces} MiB are added to "ours" for the cuBLAS
workspaces that older releases keep and torch 2.15 does not, except where there are no products. "Left" is ours less the
published peak. "Other" is the same test's peak in another version of its source or on another system, less the
published one. A `liger-*` row is one training kernel of a benchmark, forward and backward: "kernels" above.
"""
_RESERVED = """\
What torchtitan's monitor read, the allocator's reserved peak, on H100s with 95 GiB. "Nearest" is ours on torch 2.8, the
release next to the nightly that ran there, and counts in the first lines; these figures are kept, since fakedist no
longer runs on that release. "Newest" is on torch 2.15.
"""
_FIRST = (
    "Peaks by the end of the first iteration, before there is optimizer state, of the tests above that publish them.\n"
)
_STEPS = """\
The estimate covers kernels, host and collectives. "Without communication" is its error if collectives took no time.
`HEAT` and, in fp8, `FP8_HEAT` say [how much power](estimates.md#clocks-under-the-power-limit) products draw in a
training step. They are fitted, at {heat:.2f} and {fp8_heat:.2f}, on the rows that have a figure under "left out": the
estimate if the parameter is fitted on the other such rows. No parameter was fitted on rows without one, but the `HEAT`
of GPUs that are cooled by liquid, 1, was chosen for `nemotron-340b-gb200`, which does not count in the first lines. The
width of intervals is [fitted](accuracy/method.md#hosts-and-widths-fitted-on-half-of-the-rows) on half of the others;
those marked "judged" under "inside" are the other half, which alone counts there in the first lines, and rows that came
later.
"""
_HOST = """\
Most rows are Megatron-LM's functional tests of small models, whose kernels do not keep a GPU busy; three are large
mixtures of experts on GB200 and GB300. The estimate has the run's host
clock, scaled to the GPU's usual host. "Other" is the same test in another version or on another system. On half of the
rows of each host, its two numbers and the width of its interval are
[fitted](accuracy/method.md#hosts-and-widths-fitted-on-half-of-the-rows); only the other half and rows that came later,
"judged", count in the first lines. [Why they are off](accuracy/results.md#steps-that-the-host-limits).
"""
_PAIRS = """\
Each line is of two jobs that differ in one thing: the figure after the change over the one before it. The speed of the
machine cancels out, except where the GPU or the network is what changes. Pairs marked "chosen for this one" had a
parameter or a version chosen to match them, and do not count in the first lines.
"""
_LABELS = """\
Jobs that were published as "out of memory" or "fits", with a peak of rank 0. The source does not say which peak that
is. It is compared with the allocated peak by the end of the first iteration, when Megatron-LM's loop first logs it.
Later iterations, which also hold the optimizer's state, take up to 10 GB more.
Where a job ran out of memory, the source names fragmentation as the cause; the first of them fits there with expandable
segments ([details](long-runs.md)). These rows do not count as peaks in the first lines; their ratios are among the
pairs.
"""


def write(found: Results) -> None:
    """Write the page, and its picture if Chromium is installed, which draws it."""
    PAGE.write_text(text(found))
    figure = picture(found)
    if PICTURE.exists() and mark(figure) in PICTURE.read_text():
        return
    if (chromium := shutil.which("chromium")) is None:
        print(f"{PICTURE.name} is of earlier results: it takes Chromium to draw it")
        return
    PICTURE.write_text(draw(figure, chromium))


def text(found: Results) -> str:
    """The page as Markdown."""
    rows = catalogue().rows
    allocated = [row for row in rows if row.peak_bytes and row.name in found.peaks]
    reserved = [row for row in rows if row.reserved_gib is not None and row.name in found.peaks]
    labelled = [row for row in rows if row.label and row.name in found.peaks]
    stepped = [row for row in rows if row.name in found.steps]
    filled = [row for row in stepped if not row.is_host_bound]
    bound = [row for row in stepped if row.is_host_bound]
    sections = [
        _HEAD,
        "\n".join(verdicts(found)) + "\n",
        f"![Estimate over published figure of every row]({PICTURE.relative_to(PAGE.parent)})\n",
        "## Peaks, allocated\n",
        _PEAKS.format(workspaces=2 * WORKSPACE_BYTES // MIB),
        table(_PEAK_COLUMNS, [_peak_line(row, found.peaks[row.name]) for row in allocated]),
        "## Peaks, reserved\n",
        _RESERVED,
        table(_RESERVED_COLUMNS, [_reserved_line(row, found) for row in reserved]),
        "## First iterations\n",
        _FIRST,
        table(
            _FIRST_COLUMNS, [_first_line(row, found.peaks[row.name]) for row in allocated if len(row.peak_bytes) > 1]
        ),
        "## Steps\n",
        _STEPS.format(heat=found.heat, fp8_heat=found.fp8_heat),
        table(_STEP_COLUMNS, [_step_line(row, found.steps[row.name]) for row in filled]),
        "## Steps, limited by the host\n",
        _HOST,
        table(_HOST_COLUMNS, [_host_line(row, found.steps[row.name]) for row in bound]),
        "## Pairs\n",
        _PAIRS,
        table(_PAIR_COLUMNS, [line for pair in catalogue().pairs if (line := _pair_line(pair, found))]),
        "## Labels\n",
        _LABELS,
        table(_LABEL_COLUMNS, [_label_line(row, found.peaks[row.name]) for row in labelled]),
        "## Sources\n",
        table(_SOURCE_COLUMNS, _source_lines()),
        "## Not rebuilt\n",
        table(("jobs", "source", "why"), [(each.jobs, each.source, each.why) for each in catalogue().not_rebuilt]),
    ]
    return "\n".join(sections)


def verdicts(found: Results) -> list[str]:
    """A line for each kind and figure: how the rows that nothing was fitted on meet the goals."""
    rows = catalogue().rows
    lines = [
        _bytes_verdict(kind, peaks)
        for kind in dict.fromkeys(row.kind for row in rows)
        if (
            peaks := [
                (row, found.peak(row.name))
                for row in rows
                if row.kind == kind and row.name in found.peaks and not row.label
            ]
        )
    ]
    for kind, is_bound in dict.fromkeys((row.kind, row.is_host_bound) for row in rows if row.published_s):
        name = f"{kind}, limited by the host" if is_bound else kind
        chosen = [row for row in rows if (row.kind, row.is_host_bound, row.is_fitted) == (kind, is_bound, False)]
        chosen = [row for row in chosen if row.name in found.steps and (not is_bound or _is_judged(row))]
        if chosen:
            lines.append(_step_verdict(name, [(row, found.steps[row.name]) for row in chosen]))
    lines += [_interval_verdict(found, is_host_bound=is_bound) for is_bound in (False, True)]
    errors = [
        error for pair in catalogue().pairs if not pair.is_fitted and (error := _pair_error(pair, found)) is not None
    ]
    middle, near = median(map(abs, errors)), sum(abs(error) <= PAIR_WITHIN for error in errors)
    met = middle <= PAIR_MEDIAN and near == len(errors)
    share = f"{near} of {len(errors)} within {PAIR_WITHIN:.0%} (goal all)"
    lines.append(_verdict(f"pairs: median {middle:.1%} (goal {PAIR_MEDIAN:.0%}), {share}", met))
    if labelled := [row for row in rows if row.label and row.name in found.peaks]:
        told = sum(told_label(found.peaks[row.name]) == row.label for row in labelled)
        fit = sum(told_label(found.peaks[row.name]) == "fits" for row in labelled)
        lines.append(
            _verdict(f"labels: {told} of {len(labelled)} as published; fakedist says that {fit} of them fit", True)
        )
    number = len({*found.peaks, *found.steps})
    head = f"Of the {number} rows, those that nothing was fitted on, by kind; missed goals first:"
    return [head, "", *sorted(lines, key=lambda line: "missed" not in line)]


def _bytes_verdict(kind: str, pairs: Sequence[tuple[Row, Peak]]) -> str:
    errors = [bytes_error(*pair) for pair in pairs]
    unknown = sum(_cause(*pair) == NOT_KNOWN for pair in pairs)
    near, share = sum(abs(error) <= BYTES_WITHIN for error in errors), BYTES_SHARE if kind == "dense" else None
    goal = "no goal" if share is None else f"goal {share:.0%}"
    figures = f"{near} of {len(errors)} rows within {BYTES_WITHIN:.1%} ({near / len(errors):.0%}, {goal})"
    spread = f"median {median(map(abs, errors)):.3%}, most {max(map(abs, errors)):.1%}, {unknown} without a known cause"
    return _verdict(f"{kind}, peak bytes: {figures}, {spread}", share is None or near >= share * len(errors))


def _step_verdict(name: str, pairs: Sequence[tuple[Row, Step]]) -> str:
    errors, number = [abs(time_error(*pair)) for pair in pairs], len(pairs)
    near = sum(error <= STEP_WITHIN for error in errors)
    figures = (
        f"median {median(errors):.1%} (goal {STEP_MEDIAN:.0%})",
        f"{near} of {number} within {STEP_WITHIN:.0%} (goal {STEP_SHARE:.0%})",
    )
    is_met = median(errors) <= STEP_MEDIAN and near >= STEP_SHARE * number
    return _verdict(f"{name}, steps: {', '.join(figures)}", is_met)


def _interval_verdict(found: Results, *, is_host_bound: bool) -> str:
    held = held_steps(found, is_host_bound=is_host_bound)
    share, limit = sum(held) / len(held), "the host limits" if is_host_bound else "kernels limit"
    goal = f"goal {INSIDE[0]:.0%} to {INSIDE[1]:.0%}"
    line = f"intervals of steps that {limit}: {sum(held)} of {len(held)} held ({share:.0%}, {goal})"
    return _verdict(line, INSIDE[0] <= share <= INSIDE[1])


def held_steps(found: Results, *, is_host_bound: bool) -> list[bool]:
    """Whether each step is inside of its interval, of those that judge the intervals' widths."""
    rows = [row for row in catalogue().rows if row.name in found.steps and row.is_host_bound is is_host_bound]
    return [_is_inside(row, found.steps[row.name]) for row in rows if _is_judged(row)]


def _is_judged(row: Row) -> bool:
    return row.name in catalogue().judged_steps


def _verdict(line: str, is_met: bool) -> str:
    return f"- {line}." if is_met else f"- **missed:** {line}."


def bytes_error(row: Row, peak: Peak) -> float:
    """The relative difference of a peak."""
    return our_bytes(row, peak) / published_bytes(row) - 1


def told_label(peak: Peak) -> str:
    """The label that fakedist gives a row."""
    return "fits" if peak.fits else "out of memory"


def time_error(row: Row, step: Step) -> float:
    """The relative error of an estimate."""
    assert row.published_s is not None
    return step.step_s / row.published_s - 1


def _is_inside(row: Row, step: Step) -> bool:
    assert row.published_s is not None
    return step.low_s <= row.published_s <= step.high_s


def _inside(row: Row, step: Step) -> str:
    return f"{'yes' if _is_inside(row, step) else 'no'}{', judged' if _is_judged(row) else ''}"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown; columns that end with a colon have figures."""
    head = " | ".join(column.removesuffix(":") for column in columns)
    rule = "|".join("---:" if column.endswith(":") else "---" for column in columns)
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


_PEAK_COLUMNS = ("row", "job", "GPU", "type", "published:", "ours:", "left:", "other:", "cause", "made")
_RESERVED_COLUMNS = (
    "row",
    "job",
    "GPU",
    "type",
    "published:",
    "nearest:",
    "left:",
    "newest:",
    "left:",
    "cause",
    "made",
)
_FIRST_COLUMNS = ("row", "published:", "ours:", "left:")
_STEP_COLUMNS = ("row", "job", "GPU", "published:", "estimate:", "error:", "inside", "left out:",
                 "without communication:", "cause, note", "made")  # fmt: skip
_HOST_COLUMNS = ("row", "job", "GPU", "published:", "other:", "estimate:", "interval:", "error:", "inside", "made")
_PAIR_COLUMNS = ("change", "of", "published:", "ours:", "difference:", "source")
_LABEL_COLUMNS = ("row", "job", "GPU", "type", "published", "ours", "published peak:", "ours:", "left:", "ours, later:",
                  "reserved:", "made")  # fmt: skip
_SOURCE_COLUMNS = ("source", "rows", "what ran there", "what differs here", "needs Transformer Engine")


def _made(made: Made) -> str:
    seconds = "" if made.seconds is None else f", {made.seconds:.0f} s"
    return f"{made.date} {made.commit}, torch {made.torch.split('+')[0]}{seconds}"


def _gpus(row: Row) -> str:
    return f"{row.gpus} {row.gpu}"


def _peak_line(row: Row, peak: Peak) -> Sequence[str]:
    ours, theirs = our_bytes(row, peak), row.peak_bytes[-1]
    others = ", ".join(f"{(other - theirs) / MIB:+.1f} MiB" for other in row.other_peaks)
    return (f"`{row.name}`", row.job, _gpus(row), row.precision, f"{theirs:,}", f"{ours:,}",
            f"{ours - theirs:+,} ({ours / theirs - 1:+.3%})", others, _cause(row, peak), _made(peak.made))  # fmt: skip


def _label_line(row: Row, peak: Peak) -> Sequence[str]:
    told = told_label(peak)
    first, later, reserved = (f"{size / 1e9:.1f} GB" for size in (*peak.allocated_bytes, peak.reserved_bytes))
    return (f"`{row.name}`", row.job, _gpus(row), row.precision, row.label,
            told if told == row.label else f"**{told}**", f"{row.peak_gb} GB", first, f"{bytes_error(row, peak):+.1%}",
            later, reserved, _made(peak.made))  # fmt: skip


def _cause(row: Row, peak: Peak) -> str:
    return row.why_bytes or (NOT_KNOWN if abs(bytes_error(row, peak)) > BYTES_NEED_CAUSE else "")


def _reserved_line(row: Row, found: Results) -> Sequence[str]:
    peaks = (found.nearest.get(row.name), found.peaks[row.name])
    ours = [
        text
        for peak in peaks
        for text in ((f"{peak.reserved_bytes / GIB:.2f} GiB", f"{bytes_error(row, peak):+.1%}") if peak else ("", ""))
    ]
    return (f"`{row.name}`", row.job, _gpus(row), row.precision, f"{row.reserved_gib:.1f} GiB", *ours,
            _cause(row, found.peak(row.name)), " and ".join(_made(peak.made) for peak in peaks if peak))  # fmt: skip


def _first_line(row: Row, peak: Peak) -> Sequence[str]:
    theirs, ours = row.peak_bytes[0], peak.allocated_bytes[0] + row.num_workspaces[0] * WORKSPACE_BYTES
    return f"`{row.name}`", f"{theirs:,}", f"{ours:,}", f"{ours - theirs:+,} ({ours / theirs - 1:+.3%})"


def _step_line(row: Row, step: Step) -> Sequence[str]:
    published = row.published_s or 0.0
    left_out = "" if step.left_out_s is None else f"{step.left_out_s:.3f} s ({step.left_out_s / published - 1:+.1%})"
    without = "" if step.kernels_s is None else f"{step.kernels_s / published - 1:+.1%}"
    others = f"{' and '.join(f'{other:.2f}' for other in row.others_s)} s in other versions" if row.others_s else ""
    why = row.why_time or (NOT_KNOWN if abs(time_error(row, step)) > TIME_NEEDS_CAUSE else "")
    return (f"`{row.name}`", row.job, _gpus(row), f"{published:.3f} s",
            f"{step.step_s:.3f} s ({step.low_s:.2f} to {step.high_s:.2f})", f"{time_error(row, step):+.1%}",
            _inside(row, step), left_out, without,
            "; ".join(filter(None, (why, others, row.note))), _made(step.made))  # fmt: skip


def _host_line(row: Row, step: Step) -> Sequence[str]:
    published = row.published_s or 0.0
    others = ", ".join(f"{other * 1e3:.0f} ms" for other in row.others_s)
    return (f"`{row.name}`", row.job, _gpus(row), f"{published * 1e3:.1f} ms", others, f"{step.step_s * 1e3:.1f} ms",
            f"{step.low_s * 1e3:.0f} to {step.high_s * 1e3:.0f} ms", f"{time_error(row, step):+.0%}",
            _inside(row, step), _made(step.made))  # fmt: skip


def _pair_ratios(pair: Pair, found: Results) -> tuple[float, float] | None:
    """The published ratio and ours; None without results."""
    if not pair.rows:
        return pair.published, found.pairs[pair.name].ratio
    before, after = (catalogue().row(name) for name in pair.rows)
    kept: dict[str, Peak] | dict[str, Step] = found.steps if pair.figure == "step" else found.peaks
    if before.name not in kept or after.name not in kept:
        return None
    if pair.figure == "step":
        published = (after.published_s or 0.0) / (before.published_s or 1.0)
        return published, found.steps[after.name].step_s / found.steps[before.name].step_s
    ours = our_bytes(after, found.peaks[after.name]) / our_bytes(before, found.peaks[before.name])
    return published_bytes(after) / published_bytes(before), ours


def _pair_error(pair: Pair, found: Results) -> float | None:
    ratios = _pair_ratios(pair, found)
    return None if ratios is None else ratios[1] / ratios[0] - 1


def _pair_line(pair: Pair, found: Results) -> Sequence[str] | None:
    ratios = _pair_ratios(pair, found)
    if ratios is None:
        return None
    ours = f"x {ratios[1]:.3f}"
    if not pair.rows:
        ours += f" ({found.pairs[pair.name].low:.3f} to {found.pairs[pair.name].high:.3f})"
    source = pair.source or " to ".join(f"`{name}`" for name in pair.rows)
    chosen = " (chosen for this one)" if pair.is_fitted else ""
    return pair.change, pair.figure, f"x {ratios[0]:.3f}", ours + chosen, f"{ratios[1] / ratios[0] - 1:+.1%}", source


def _source_lines() -> list[Sequence[str]]:
    lines = []
    for name, source in catalogue().sources.items():
        own = [row for row in catalogue().rows if row.source == name]
        commits = sorted({row.peak_commit for row in own if row.peak_commit})
        cited = source.cited + (f", some peaks @{', @'.join(commits)}" if commits else "")
        needs = "yes" if source.script == "megatron" else "no"
        lines.append((cited, str(len(own)), source.ran, source.differs, needs))
    return lines


def picture(found: Results) -> go.Figure:
    """Estimate over published figure of every row: bytes above, steps with their intervals below."""
    figure = go.Figure()
    groups: dict[str, list[tuple[Row, float, float, float]]] = {}
    for row in catalogue().rows:
        if row.name in found.peaks:
            ratio = 1 + bytes_error(row, found.peak(row.name))
            groups.setdefault(_group("peak", row), []).append((row, ratio, ratio, ratio))
    for row in catalogue().rows:
        if row.name in found.steps and row.published_s:
            step = found.steps[row.name]
            ratios = (value / row.published_s for value in (step.step_s, step.low_s, step.high_s))
            groups.setdefault(_group("step", row), []).append((row, *ratios))
    at = 0
    for name, points in groups.items():
        places = list(range(at, at + len(points)))
        at += len(points) + 2
        figure.add_scatter(
            x=places, y=[100 * (ratio - 1) for _, ratio, _, _ in points], name=name, mode="markers",
            marker={"color": _colour(points[0][0]), "size": 7, "symbol": [_symbol(name, row) for row, *_ in points]},
            error_y={"type": "data", "symmetric": False, "thickness": 1.2, "width": 2, "color": MUTED,
                     "array": [100 * (high - ratio) for _, ratio, _, high in points],
                     "arrayminus": [100 * (ratio - low) for _, ratio, low, _ in points]},
        )  # fmt: skip
    figure.update_layout(
        width=1000, height=420, paper_bgcolor=PANEL, plot_bgcolor=PANEL, margin={"l": 60, "r": 20, "t": 50, "b": 30},
        font={"family": "Helvetica, Arial, sans-serif", "size": 12, "color": INK},
        legend={"orientation": "h", "y": -0.05},
        title={"text": "Estimate over published figure, with 90 % intervals; hollow: experts, or not in bf16",
               "font": {"size": 15}},
        xaxis={"showticklabels": False, "showgrid": False, "zeroline": False},
        yaxis={"ticksuffix": " %", "gridcolor": LINE, "zerolinecolor": INK, "range": [-60, 110]},
    )  # fmt: skip
    return figure


def _colour(row: Row) -> str:
    return (*GROUP_COLOURS, INK)[
        ("h100", "gb200", "a100", "b200", "gb300", "h200", "b300").index(row.gpu.split("-")[0])
    ]


def _symbol(group: str, row: Row) -> str:
    shape = "diamond" if group.startswith("peak") else "square" if group.endswith("host") else "circle"
    return f"{shape}{'-open' if row.kind == 'experts' or row.precision != 'bf16' else ''}"


def _group(figure: str, row: Row) -> str:
    host = ", limited by the host" if figure == "step" and row.is_host_bound else ""
    return f"{figure}: {row.gpu.split('-')[0].upper()}{host}"


def mark(figure: go.Figure) -> str:
    """A comment that says of which figure a picture is."""
    text = figure.to_json(engine="json")  # orjson, which plotly takes where it is installed, writes other floats
    return f"<!-- {hashlib.sha256(text.encode()).hexdigest()} -->"


def draw(figure: go.Figure, chromium: str) -> str:
    """The figure as SVG, by plotly.js in Chromium."""
    script = f"""
    Plotly.newPlot("chart", {figure.to_json()}).then(chart => Plotly.toImage(chart, {{format: "svg"}})).then(url =>
    {{ document.title = "drawn"; document.getElementById("svg").textContent = decodeURIComponent(url.split(",", 2)[1]
    === undefined ? "" : url.slice(url.indexOf(",") + 1)); }})"""
    page = (
        f'<div id="chart"></div><pre id="svg"></pre><script>{plotly_text().decode()}</script><script>{script}</script>'
    )
    with tempfile.TemporaryDirectory(prefix="truth-") as text:
        path = Path(text) / "page.html"
        path.write_text(f"<!doctype html><meta charset=utf-8>{page}")
        command = [chromium, "--headless", "--no-sandbox", "--virtual-time-budget=20000", "--dump-dom", path.as_uri()]
        dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    drawn = re.search(r'<pre id="svg">(.*?)</pre>', dom, re.DOTALL)
    assert drawn is not None
    return f"{html.unescape(drawn[1])}\n{mark(figure)}\n"
