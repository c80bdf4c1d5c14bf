"""A run: whether it fits, its faults, what would help, where its memory and its time go, and its notes.

Reading a table that is missing or damaged raises RunDirectoryError.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from fakedist.analysis.memory_tables import unfolded
from fakedist.report.content import memory, time
from fakedist.report.content.host_memory import host_memory_blocks, short_figures
from fakedist.report.content.report_blocks import (
    Advice,
    Block,
    Changes,
    Chapter,
    Chart,
    Details,
    Fact,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    Verdict,
    count_column,
    first_rows,
    part,
    text_column,
)
from fakedist.report.content.wording import (
    ANSWERS,
    FINDINGS_TITLE,
    advice_block,
    advice_line,
    collector_gain,
    command_line,
    finding_text,
    gives_alone,
    gives_text,
    layer_label,
    note_texts,
    num_warnings,
    peak_moment,
    peak_size,
    remedy_text,
    run_facts,
    short_facts,
    sizes_figures,
    source_word,
    time_figures,
    top_advice,
)
from fakedist.results.opening import open_run
from fakedist.results.run import Run
from fakedist.results.summing_up import layer_memory
from fakedist.results.verdict import (
    broke_off,
    has_room,
    limit_text,
    limits_text,
    line_in_file,
    refusal_stack,
    relative_time,
    short_line,
    step_verdict,
    timed_step_name,
    verdict,
)
from fakedist.rundir.directory import SNAPSHOT_NAME, TRACE_NAME
from fakedist.rundir.finding import Finding
from fakedist.rundir.notes import counted
from fakedist.rundir.plain import to_plain
from fakedist.rundir.summary import Summary
from fakedist.rundir.table_rows import TABLES
from fakedist.units import format_bytes

if TYPE_CHECKING:
    from fakedist.report.page.run_charts import RunCharts


def run_object(run_directory: Path | Run, *, all_layers: bool = False) -> dict[str, object]:
    """The run's figures as one object: keys of :class:`fakedist.rundir.summary.Summary`, and ``run_directory``."""
    run = open_run(run_directory)
    summary = run.summary
    if all_layers:
        layers = run.table("layers")
        summary = replace(summary, layers=layer_memory(layers, unfolded(layers)))
    summary = replace(summary, notes=[*summary.notes, *run.finding_notes])
    return {**to_plain(summary), "findings": to_plain(run.findings), "run_directory": str(run.path)}


#: Parts of the report that can be printed alone, as can the communication, which has a report of its own.
SECTIONS = ("memory", "time", "findings", "advice", "notes")


def run_report(
    run_directory: Path | Run,
    *,
    all_layers: bool = False,
    section: str = "",
    table: str = "layers",
    folder: Path | None = None,
    is_full: bool = False,
) -> Report:
    """All of a run, or one of ``SECTIONS``.

    Args:
        run_directory: The run.
        all_layers: Show small layers too, and do not fold repeated ones.
        section: The part; empty for all.
        table: The table of its CSV.
        folder: The directory that a page goes to. It links to the run's files if that is the run's own.
        is_full: A terminal shows all of it, not a screen.
    """
    opened = open_run(run_directory)
    run = opened.keeping_tables()

    @cache
    def charts() -> RunCharts:
        from fakedist.report.page.run_charts import RunCharts  # plotly takes a while to import

        return RunCharts(run)

    makers: dict[str, Callable[[], list[Block]]] = {
        "peak": partial(_peak, run, charts),
        "findings": partial(_findings, run, is_alone=section == "findings"),
        "advice": partial(_advice, run, charts, is_alone=section == "advice"),
        "memory": partial(_memory, run, charts, all_layers=all_layers),
        "time": lambda: (
            time.time_blocks(run, all_layers=all_layers, charts=lambda: charts().time()) if run.summary.timed else []
        ),
        "communication": partial(_communication, run, charts),
        "outside": partial(_outside, run),
        "notes": partial(_notes, run, folder),
    }
    parts = {"": [*makers], "memory": ["peak", "memory", "communication", "outside"]}.get(section, [section])
    return Report(
        "run",
        [Facts([Fact(*row) for row in run_facts(run)], kind="about"), *(part(makers[name]) for name in parts)],
        partial(run_object, opened, all_layers=all_layers),
        partial(time.table_rows, opened, table, all_layers=all_layers),
        name=run.path.name,
        screen=None if is_full or section or all_layers else partial(short_report, run_directory),
    )


def _peak(run: Run, charts: Callable[[], RunCharts]) -> list[Block]:
    """Whether the rank fits, what it needs, and the first of what would help."""
    summary = run.summary
    figures = (
        [Fact("GPU memory", format_bytes(summary.capacity_bytes), key="capacity")] if summary.capacity_bytes else []
    )
    if summary.timed:
        figures += [fact for fact in time_figures(*summary.timed) if fact.name in ANSWERS]
        figures += sizes_figures(summary, run.manifest.job, summary.timed[1].step)
    left = ""
    if summary.left_during_init is not None:
        left = f"This rank {dict(run_facts(run))['ended']}."
    elif broke_off(summary):
        left = f"The figures are of what ran until the rank ended: {dict(run_facts(run))['ended']}."
    num, num_grave = len(summary.notes), num_warnings(summary.notes)
    grave = f", {num_grave} of them {'a warning' if num_grave == 1 else 'warnings'}" if num_grave else ""
    return [
        Chapter("verdict", "Verdict", is_card=True),
        *([] if run.memory is None else _fits(run)),
        *([Remark(left, key="left")] if left else []),
        Details(lambda: [Facts(figures, kind="figures"), *charts().gauge(), *_holders(run)]),
        *_answers(run),
        *([Remark(f"{counted(num, 'note')} on these figures{grave}: at the end")] if num else []),
    ]


_TONES = {(True, True): "good", (True, False): "maybe"}
#: What some notes say of the reserved peak.
_BOUNDS = {
    "streams_keep_least": ", at least (--gpu-lag full: at most)",
    # Of runs of earlier versions.
    "streams_keep_estimated": ", estimated (--gpu-lag none: at least; full: at most)",
    "streams_keep_most": ", at most (--gpu-lag none: at least)",
}


def _fits(run: Run, *, is_short: bool = False) -> list[Block]:
    summary = run.summary
    cwd = run.manifest.cwd
    allocated, reserved, capacity = summary.peak_allocated_bytes, summary.peak_reserved_bytes, summary.capacity_bytes
    of = f"{reserved / capacity:.1%} of the GPU's {format_bytes(capacity)}" if capacity else ""
    if summary.asleep_bytes:
        of += f"; {format_bytes(summary.asleep_bytes)} of it without memory behind it (asleep)"
    of = "".join((of, *(text for note in summary.notes if (text := _BOUNDS.get(note.code)))))
    when = peak_moment(summary) + peak_size(summary) if allocated else "nothing was allocated on the GPU"
    name = "allocated"
    most = allocated
    if not allocated and (used := memory.most_in_use(run)):
        name = "in use"
        most = used
        when = "by processes that the script started"
    # Without segments, a snapshot does not have it.
    held = format_bytes(reserved) if reserved >= allocated else "not in the file"
    rows = [
        Fact(name, format_bytes(most), when, key="peak_allocated"),
        Fact("reserved", held, of, key="peak_reserved"),
    ]
    if is_short and summary.host_memory:
        rows += short_figures(summary.host_memory.node)
    blocks: list[Block] = [Facts(rows, "Peak memory, measured", kind="lead", source="measured")]
    if fit := verdict(summary, cwd):
        blocks.append(Verdict(fit.more, word=fit.word, tone=_TONES.get((fit.fits, fit.is_sure), "no")))
    if not is_short and (stack := refusal_stack(summary, cwd)):
        blocks.append(Remark(f"called by {', '.join(stack)}", key="called_by"))
    return blocks


def _answers(run: Run) -> list[Block]:
    """The remedy or the first advice, and what limits the step: that first where memory has room."""
    summary = run.summary
    rows = []
    if remedy := remedy_text(summary):
        rows.append(Fact("what would make it fit, estimated", remedy, key="remedy"))
    elif advice := top_advice(summary, run.manifest.cwd):
        rows.append(Fact("what would help", advice, key="advice"))
    if limit := step_verdict(summary):
        rows.insert(0 if has_room(summary) else len(rows), Fact(*limit, key="limit"))
    return [Facts(rows, kind="answers")] if rows else []


def _holders(run: Run) -> list[Block]:
    """The layer, without its children, and the line that hold most at the peak."""
    rows = []
    peak = run.peak_allocated_bytes
    if peak and run.by_category is not None and len(layers := run.layers()):
        row = layers.nlargest(1, "peak_own_bytes").to_dict("records")[0]
        held = row["peak_own_bytes"]
        name = layer_label(row["name"], row["num_repeats"])
        rows.append(Fact("most, by layer, own", f"{format_bytes(held)} {held / peak:.1%}", name))
    if peak and run.memory is not None and (lines := memory.held_lines(run)):
        text = f"{format_bytes(lines[0].bytes)} {lines[0].bytes / peak:.1%}"
        rows.append(Fact("most, by line", text, lines[0].label))
    return [Facts(rows, kind="answers")] if rows else []


def _findings(run: Run, *, is_alone: bool) -> list[Block]:
    if not run.findings:
        return [Items("Findings", ["no rule of docs/findings.md saw a fault in this run"])] if is_alone else []
    intro = (
        "Faults that rules saw in this run, certain ones first. What mending each gives is estimated, each on its own; "
        "fakedist explain CODE says how a fault is seen and what mends it."
    )
    unsure = "not certain: the job may do this on purpose, or the host's time decides it"
    mends = {} if is_alone else {piece.rule: advice_line(piece, run.summary) for piece in run.summary.advice}
    items = [
        Advice(
            finding.text,
            finding.code,
            "" if finding.is_certain else unsure,
            line=line_in_file(finding.line, run.manifest.cwd),
            remarks=[
                ": ".join(filter(None, (finding.change, "" if finding.advice in mends else gives_text(finding)))),
                *([mends[finding.advice]] if finding.advice in mends else []),
            ],
        )
        for finding in run.findings
    ]
    return [Chapter("findings", "Findings", "Findings", intro=intro), Changes(FINDINGS_TITLE, items)]


_HELPS = "What would help, estimated, each on its own"


def _advice(run: Run, charts: Callable[[], RunCharts], *, is_alone: bool) -> list[Block]:
    """List what would help. A change that mends a finding stands there, but on a page its switch is here."""
    summary = run.summary
    codes = {} if is_alone else {finding.advice: finding.code for finding in run.findings}
    if not summary.advice:
        return []
    intro = (
        "Computed from this run: how much lower the peak is without what each change saves. Each figure is for one "
        "change alone; they do not add up."
    )
    if has_room(summary) and summary.timed and summary.timed[0].gains:
        intro += " The GPU has room, so what shortens the step helps more: the table What would help, time, has it."

    def switched() -> list[Block]:
        switches = charts().switches
        numbers = {switch.advice.title: number for number, switch in enumerate(switches)}
        advised = {advice.title for advice in summary.advice}
        every = [*summary.advice, *(one.advice for one in switches if one.advice.title not in advised)]
        items = [replace(advice_block(advice, run), switch=numbers.get(advice.title, -1)) for advice in every]
        items = [replace(item, text=f"mends {codes[item.rule]}") if item.rule in codes else item for item in items]
        return [Changes(_HELPS, items, has_switches=bool(switches))]

    def plain() -> list[Block]:
        items = [advice_block(advice, run) for advice in summary.advice if advice.rule not in codes]
        return [Changes(_HELPS, items)] if items else []

    return [Chapter("advice", "Advice", "What would help", "estimated", intro), Details(switched, plain)]


def _memory(run: Run, charts: Callable[[], RunCharts], *, all_layers: bool) -> list[Block]:
    summary = run.summary
    cwd = run.manifest.cwd
    is_described = run.by_category is not None
    blocks: list[Block] = [Chapter("memory", "Memory", "Memory over the steps", "measured")]
    blocks += [Details(lambda: charts().timeline())]
    inferred = ", inferred" if run.is_inferred else ""
    sheets = (summary.peak_reserved_bytes, memory.phase_sheet), (summary.peak_allocated_bytes, memory.category_sheet)
    blocks += [
        replace(sheet, title=sheet.title + inferred)
        for sheet in (make(summary) for most, make in sheets if most and is_described)
    ]
    blocks += [
        Chapter("device", "In use", "In use of the GPU", "simulated", _IN_USE),
        Details(lambda: charts().device()),
    ]
    if summary.named_phases:
        blocks.append(memory.named_phase_sheet(summary))
    if summary.engine is not None:
        blocks.append(memory.engine_sheet(summary.engine, summary.estimated_outside))
    if summary.engine_sleeps:
        blocks.append(memory.engine_sleep_sheet(summary.engine_sleeps))
    if not summary.peak_allocated_bytes:
        return blocks
    title = f"What is held at the peak: {format_bytes(summary.peak_allocated_bytes)}"
    blocks += [Chapter("peak", "Peak", title, "measured"), Details(lambda: charts().peak())]
    blocks += filter(None, [memory.line_sheet(run), memory.largest_sheet(run)])
    moments = summary.reserved
    if any(moment.unused for moment in moments):
        intro = "The caching allocator takes segments from the GPU and cuts blocks from them."
        blocks.append(Chapter("segments", "Reserved", "Reserved and not allocated", "measured", intro))
        blocks += [memory.unused_sheet(moments, cwd, is_described=is_described), Details(lambda: charts().segments())]
        blocks += filter(None, [memory.held_sheet(moments[0], cwd, is_described=is_described)])
    if is_described:
        title = f"Layers at the peak, with children{inferred}"
        intro = "Repeated layers share one row with their sum; open it to see each."
        blocks += [
            Chapter("layers", "Layers", title, "measured", intro),
            memory.layer_sheet(run, all_layers=all_layers),
        ]
    return blocks


_IN_USE = "What all processes of the rank use of one GPU, without their contexts. What sleeps is not in use."


def _communication(run: Run, charts: Callable[[], RunCharts]) -> list[Block]:
    summary = run.summary
    section = Chapter("communication", "Communication", "Communication peers", "simulated")
    calls = [memory.collective_sheet(summary.collectives, has_lanes=bool(summary.timed))] if summary.collectives else []
    return [section, Details(lambda: charts().groups()), *calls, Details(lambda: charts().calls_over_time())]


def _outside(run: Run) -> list[Block]:
    summary = run.summary
    estimated = None if run.is_inferred else summary.estimated_outside  # a file of a real GPU tells nothing of it
    outside = memory.outside_blocks(estimated) if estimated else []
    host = host_memory_blocks(summary.host_memory, run.manifest.cwd) if summary.host_memory else []
    return [*outside, *host]


def _notes(run: Run, folder: Path | None) -> list[Block]:
    """The run itself, and limits of the figures: notes, unanswered functions, made-up values."""
    notes = [*run.summary.notes, *run.finding_notes]
    texts = note_texts(notes, run.manifest.cwd)
    num = num_warnings(notes)
    lists = (
        Items("Notes: figures that are made up, missing or may be wrong", texts[:num]),
        Items(f"{counted(len(texts) - num, 'note')}: no figure is in doubt", texts[num:], is_folded=True),
    )
    blocks = [one for one in lists if one.texts]
    words = Chart("words", "Words", lambda: bool(run.summary.timed))
    section = Chapter("reading", "Notes", "How to read this page")
    return [
        Details(lambda: _about(run, folder)),
        Details(lambda: [section, *blocks, *_reading(run), words], lambda: blocks),
    ]


def _about(run: Run, folder: Path | None) -> list[Block]:
    """The job that ran: command, world, rank, versions, GPU. ``folder`` is the directory that the page is for."""
    manifest = run.manifest
    job = run.manifest.job
    summary = run.summary
    title = "This snapshot" if run.is_snapshot else "This run"
    names = {name: name.replace("wall_us", "wall time").replace("_", " ") for name in manifest.provenance}
    provenance = [Fact(names[name], text) for name, text in manifest.provenance.items()]
    sources = Facts(provenance, "Where the figures come from", is_detail=True)
    if job is None:  # another program recorded it
        return [Chapter("run", "Run", title), Facts([Fact(*row) for row in run_facts(run)]), sources]
    versions = {
        "torch": summary.torch,
        "CUDA": manifest.versions.get("cuda"),
        "Python": manifest.versions.get("python"),
        "fakedist": manifest.fakedist,
    }
    rows = {
        "command": command_line(manifest.command),
        "in": manifest.cwd,
        **dict(run_facts(run)),
        "versions": ", ".join(f"{name} {text}" for name, text in versions.items() if text),
        "git commit": manifest.git_commit,
        "when": manifest.created,
    }
    facts = [Fact(name, text, is_code=name in _CODE) for name, text in rows.items() if text]
    opens_in = {TRACE_NAME: "ui.perfetto.dev", SNAPSHOT_NAME: "pytorch.org/memory_viz"}
    is_here = folder is not None and folder.resolve() == run.path
    links = [[(name, name)] if is_here and (run.path / name).exists() else [] for name in opens_in]
    columns = [text_column("file", [*opens_in]), text_column("opens in", [*opens_in.values()])]
    names_of = ", ".join(sorted(TABLES))
    tables = f"fakedist report {run.path} --format csv --table NAME prints a table, where NAME is {names_of}"
    return [Chapter("run", "Run", title), Facts(facts), sources, Sheet("Its files", columns, [tables], links=links)]


_CODE = ("command", "in", "job", "git commit", "run", "page")


def _reading(run: Run) -> list[Block]:
    """Values that were made up, and functions that the virtual GPU refused."""
    invented, unanswered = run.table("invented"), run.table("unanswered")
    lines = [short_line(str(line), run.manifest.cwd) for line in invented["line"]]
    columns = [
        text_column("read by", invented["operation"].astype(str).tolist()),
        text_column("at", lines, kind="line"),
        count_column("times", invented["num_calls"].tolist()),
        count_column("values", invented["num_values"].tolist()),
    ]
    refused = [f"{name}: {num}" for name, num in zip(unanswered["function"], unanswered["num_calls"], strict=True)]
    return [
        *([Sheet("Made-up values", columns)] if lines else []),
        *([Items("CUDA functions that the virtual GPU refused", refused)] if refused else []),
    ]


_NUM_STEPS, _NUM_TRACED = 5, 6
_NUM_LAYERS, _NUM_LINES, _NUM_GAINS, _NUM_ADVICE, _NUM_FINDINGS, _NUM_OUTLOOK = 5, 5, 3, 3, 5, 5
#: Columns of the table of layers that the short report leaves out.
_ONLY_IN_FULL = ("grads", "other")


def short_report(run_directory: Path | Run) -> Report:
    """A screen of a run: its verdict, its limits, five layers and lines, and as much advice as there is room for.

    The gravest warning of figures that are made up or may be wrong follows. The last line says how to see the rest.
    """
    run = open_run(run_directory).keeping_tables()
    summary = run.summary
    cwd = run.manifest.cwd
    blocks: list[Block] = [Facts([Fact(*row) for row in short_facts(run)], kind="about")]
    if run.memory is not None:
        blocks += _fits(run, is_short=True)
        if remedy := remedy_text(summary, is_short=True):
            blocks.append(Facts([Fact("what would make it fit, estimated", remedy)], kind="answers"))
    if summary.timed:
        step, source = summary.timed
        is_imported = run.manifest.imported is not None
        figures = [fact for fact in time_figures(step, source) if is_imported or fact.name in ANSWERS]
        figures += sizes_figures(summary, run.manifest.job, source.step)
        texts = filter(None, (limit_text(step), limits_text(step)))
        blocks.append(Facts(figures, f"Time of {timed_step_name(summary, source.step)}, {source_word(source)}"))
        blocks += [Remark(text) for text in texts]
        if is_imported:  # another program's report
            blocks += [Items("Notes", [note.text for note in source.notes]), *_traced(run)]
    if run.memory is not None and run.is_inferred and run.by_category is not None:
        blocks.append(_in_short(memory.category_sheet(summary), "category at the peak, inferred"))
    if summary.peak_allocated_bytes and run.by_category is not None and run.num_rows("layers") > 1:
        blocks.append(_largest_layers(run))
    if lines := memory.line_sheet(run):
        outer = lines.with_rows([at for at, row in enumerate(lines.rows) if not row.is_inner])
        blocks.append(_in_short(outer, "line at the peak", _NUM_LINES))
    if summary.notes and (not summary.peak_allocated_bytes or run.by_category is None):  # they say why
        blocks.append(Items("Notes", note_texts(summary.notes, cwd)))
    if run.findings:
        shown = [finding_text(one, cwd) for one in run.findings[:_NUM_FINDINGS]]
        blocks.append(Items(FINDINGS_TITLE, shown, least=1))
    blocks += _outlook(summary, run.findings)
    warnings = note_texts(summary.notes, cwd)[: num_warnings(summary.notes)] if summary.peak_allocated_bytes else []
    blocks += [Remark(text, is_warning=True) for text in warnings[:1]]
    notes = f"{counted(len(summary.notes), 'note')} and " if summary.notes else ""
    if more := len(warnings[1:]):
        notes = f"{len(summary.notes)} notes, {more} more of them {'a warning' if more == 1 else 'warnings'}, and "
    if left_out := run.findings[_NUM_FINDINGS:]:
        notes = f"{counted(len(left_out), 'more finding')}, {notes or 'and '}"
    given = shlex.quote(str(run.path if isinstance(run_directory, Run) else run_directory))
    rest = f"{notes}every table: fakedist report {given} --full; a part: --section {'|'.join(SECTIONS)}"
    return Report("run", [*blocks, Remark(rest, is_code=True)], partial(run_object, run))


def _in_short(sheet: Sheet, title: str, most: int = 0) -> Sheet:
    shown = first_rows(sheet, most) if most else sheet
    return replace(shown.shortened, title=title, remarks=[])


def _largest_layers(run: Run) -> Sheet:
    """The layers that hold most by themselves, in their order."""
    sheet = memory.layer_sheet(run, all_layers=False)
    own = next(column.values or () for column in sheet.columns if column.name == "own")
    seen = [at for at, row in enumerate(sheet.rows) if not row.is_small]
    largest = sorted(seen, key=lambda at: -(own[at] or 0))[:_NUM_LAYERS]
    kept = sheet.with_rows(sorted(largest))
    columns = [column for column in kept.columns if column.name not in _ONLY_IN_FULL]
    title = f"layer at the peak, with children{', inferred' if run.is_inferred else ''}"
    return _in_short(replace(kept, columns=columns), title)


def _traced(run: Run) -> list[Sheet]:
    """The steps that a tool traced of another program, and where one of them goes."""
    step, source = time.timed(run)
    path = [_in_short(time.path_sheet(step, source.source), "critical path", _NUM_TRACED)] if step.critical_path else []
    steps = replace(source, steps=source.steps[-_NUM_STEPS:])
    layers = time.layer_time_sheet(run, all_layers=False)
    sheets = [
        *([_in_short(time.process_sheet(source), "process")] if source.processes else []),
        *([_in_short(time.step_sheet(steps), "step")] if source.steps else []),
        *([_in_short(time.group_time_sheet(step, "measured"), "collective")] if step.by_group else []),
        *path,
        _in_short(time.family_sheet(step, source.source), "family of kernels"),
        _in_short(layers, "layer, with children", _NUM_TRACED),
        _in_short(time.operation_sheet(run, _NUM_TRACED), "operation"),
        _in_short(time.top_sheet(run), "kernel", _NUM_TRACED),
    ]
    return [sheet for sheet in sheets if sheet.title != "layer, with children" or len(sheet.columns[0].cells) > 1]


def _outlook(summary: Summary, findings: Sequence[Finding]) -> list[Block]:
    """The changes that lower the peak most and those that shorten the step most, in turns."""
    advice, gains = _advice_lines(summary, findings), _gain_lines(summary, findings)
    first, second = (gains, advice) if has_room(summary) or summary.remedy else (advice, gains)
    texts = [text for pair in zip_longest(first, second) for text in pair if text][:_NUM_OUTLOOK]
    least = bool(gains) + (bool(advice) and not summary.remedy)
    return [Items(_HELPS, texts, least=least)] if texts else []


def _advice_lines(summary: Summary, findings: Sequence[Finding]) -> list[str]:
    """One line for each change that lowers the peak most, and that neither the verdict nor a finding names."""
    remedied = summary.remedy.titles if summary.remedy else []
    explained = {finding.advice for finding in findings[:_NUM_FINDINGS]}
    kept = [
        piece
        for piece in summary.advice
        if gives_alone(piece) and [piece.title] != remedied and piece.rule not in explained
    ]
    return [advice_line(piece, summary) for piece in kept[:_NUM_ADVICE]]


def _gain_lines(summary: Summary, findings: Sequence[Finding]) -> list[str]:
    """One line for each change that shortens the step most, and that neither the limit nor a finding names."""
    if not summary.timed:
        return []
    step = summary.timed[0]
    limit = limit_text(step)
    mended = {finding.advice for finding in findings[:_NUM_FINDINGS]}
    pieces = [
        (gain.step_us, f"step {relative_time(gain.step_us, step.step_us)}: {gain.title}")
        for gain in step.gains
        if gain.step_us < step.step_us * (1 - _LEAST_GAIN)
        and f"; {gain.title}: " not in limit
        and gain.option not in mended
    ]
    if text := collector_gain(step):
        pieces.append((step.step_us - step.collector_us, text))
    return [text for _, text in sorted(pieces)[:_NUM_GAINS]]


#: A shorter step than this is not worth a line.
_LEAST_GAIN = 0.001
