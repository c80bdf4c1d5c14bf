"""Wording that terminal, page and Markdown share: the verdict, the command, how the run ended, and times in words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from fakedist.cost_model.accuracy import HELD_HOST_STEPS, HELD_STEPS
from fakedist.cost_model.breakdown import PEAK_DTYPE
from fakedist.options import Job
from fakedist.report.content import report_blocks as blocks
from fakedist.report.content.report_blocks import Fact
from fakedist.results.run import Run
from fakedist.results.verdict import communication_word, line_in_file, short_line, span_text, step_text, verdict
from fakedist.rundir.directory import PAGE_NAME
from fakedist.rundir.finding import Finding
from fakedist.rundir.notes import Note, counted, listed
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.step_time import HostTime, KernelSource, StepTime
from fakedist.rundir.summary import Advice, Remedy, Summary
from fakedist.rundir.time_notes import WARNINGS
from fakedist.units import format_bytes, format_flops, format_us

#: Columns of the layer table: their categories, and their rank for leaving columns out.
LAYER_COLUMNS = {
    "params": (("parameter",), 0),
    "grads": (("gradient",), 3),
    "opt state": (("optimizer_state",), 1),
    "activations": (("activation",), 0),
    "temps": (("temporary",), 2),
    "other": (("workspace", "communication", "other"), 4),
}
_SECRET = re.compile(
    r"^((?:--[\w-]+=)?\w*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY)\w*)=.+", re.IGNORECASE | re.DOTALL
)
_PACKAGES_WITHIN = re.compile(r"(?<=\s)/\S*/(?:site|dist)-packages/")
MIN_SHARE = 0.001  # layers below a thousandth of the peak are left out of the folded table, and counted


def job_command(job: Job) -> str:
    """The script and its arguments as typed."""
    return " ".join([("-m " if job.is_module else "") + job.target, *job.arguments])


def peak_moment(summary: Summary) -> str:
    """Step and phase of the peak; empty if they are unknown."""
    return f"step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else ""


#: Inputs of steps that differ by a smaller fraction are alike.
_ALIKE = 0.01


def _sizes(summary: Summary) -> dict[int, int]:
    """Elements of the model's inputs by step, where they differ; without the first, which may be a pipeline's probe."""
    sizes = {row.step: int(row.elements) for row in summary.steps if row.step > 1 and row.elements > 0}
    return sizes if sizes and max(sizes.values()) > (1 + _ALIKE) * min(sizes.values()) else {}


def sizes_figures(summary: Summary, job: Job | None, step: int) -> list[Fact]:
    """The optimizer steps of a step, if it has several, and its inputs, where those of recorded steps differ."""
    updates = 1 if job is None else job.updates_per_step
    figures = [Fact("updates", f"{updates}", "optimizer steps in each step, by --updates-per-step")] * (updates > 1)
    if (sizes := _sizes(summary)) and step in sizes:
        ordered = sorted(sizes.values())
        every = (
            f"{ordered[0]:,} to {ordered[-1]:,} in steps {min(sizes)} to {max(sizes)}, median {median(ordered):,.0f}"
        )
        figures.append(Fact("inputs", f"{sizes[step]:,}", f"elements; {every}: the time is of this size alone"))
    return figures


def peak_size(summary: Summary) -> str:
    """How large the inputs of the step with the peak are, and what other steps needed, where inputs differ."""
    sizes = _sizes(summary)
    if not sizes or summary.peak_step not in sizes:
        return ""
    own, most = sizes[summary.peak_step], max(sizes.values())
    peaks = [row.peak_allocated_bytes for row in summary.steps if row.step in sizes]
    which = "the largest inputs" if own == most else f"inputs of {own:,} elements (the largest: {most:,})"
    return f", with {which}; {span_text(min(peaks), max(peaks))} in steps {min(sizes)} to {max(sizes)}"


def command_line(command: list[str]) -> str:
    """The whole command, ready to be typed again, without values that are named as secrets: pages are mailed."""
    program = Path(command[0]).name if command else ""
    names = {"__main__.py": "python -m fakedist", "cli.py": "python cli.py"}
    return " ".join([names.get(program, program), *(shlex.quote(_SECRET.sub(r"\1=...", word)) for word in command[1:])])


def ending(summary: Summary, cwd: str) -> str:
    """The run's end, and the number of its steps."""
    exit_ = summary.exit
    num_steps = len(summary.steps)
    if exit_.ended_by_itself and not num_steps:
        left = summary.left_during_init
        read = ""
        if left is not None and left.not_sent:
            read = f"; it read what another rank should have sent: {_within(left.not_sent, cwd)}"
            read += f"; try {left.command}" if left.command else ""
        if left is not None and left.line:
            where = short_line(left.line, cwd)
            return f"left the job during init, before a first step: exit {exit_.code} at {where}{read}"
        return "finished without a training step" + (f": exit {exit_.code}" if exit_.code else "") + read
    return f"{exit_.in_words} after {num_steps} step{'' if num_steps == 1 else 's'}"


def note_texts(notes: Sequence[Note], cwd: str) -> list[str]:
    """The notes' texts, the gravest first, with files relative to the working directory or to installed packages."""
    return [_within(note.text, cwd) for note in sorted(notes, key=lambda note: _gravity(note.code))]


def num_warnings(notes: Sequence[Note]) -> int:
    """The notes on figures that are made up, missing or may be wrong, which are the first of :func:`note_texts`."""
    return sum(note.code in WARNINGS for note in notes)


def _gravity(code: str) -> int:
    return WARNINGS.index(code) if code in WARNINGS else len(WARNINGS)


def _within(text: str, cwd: str) -> str:
    text = _PACKAGES_WITHIN.sub("", text)
    root = cwd.rstrip("/")
    return text.replace(f" {root}/", " ") if root else text


def layer_label(name: str, num_repeats: int = 1) -> str:
    """A layer's name in tables."""
    return (name or "(outside of modules)") + (f" x{num_repeats}" if num_repeats > 1 else "")


#: What a piece of advice gives.
_OF = {
    "peak_allocated_bytes": "less allocated",
    "peak_reserved_bytes": "less reserved",
    "peak_used_bytes": "less in use",
    "cache_bytes": "more KV cache",
    "host_bytes": "less pinned on the host",
}


def advice_block(advice: Advice, run: Run) -> blocks.Advice:
    """A piece of advice, with its outcome if the rank does not fit, and its price."""
    summary = run.summary
    at_peak = " at the peak" if advice.of.startswith("peak_") else ""
    then = _price(advice) if summary.fits else outcome_text(advice)
    return blocks.Advice(
        advice.title,
        _gives(advice),
        advice.text,
        of=f"{_OF[advice.of]}{at_peak}{'' if gives_alone(advice) else ' by itself'}",
        line=line_in_file(advice.line, run.manifest.cwd),
        remarks=[then] if then else [],
        rule=advice.rule,
    )


def gives_alone(advice: Advice) -> bool:
    """True for a change that lowers the peak by itself, not only once another has."""
    return advice.gives_bytes > 0


def advice_line(advice: Advice, summary: Summary) -> str:
    """A piece of advice in short: "7.32 GiB less allocated: checkpoint layers.0-79; the step +24% to 29%"."""
    then = _price(advice, is_short=True) if summary.fits else outcome_text(advice, is_short=True)
    return "; ".join(filter(None, (f"{_gives(advice)} {_OF[advice.of]}: {advice.title}", then)))


#: The heading of findings.
FINDINGS_TITLE = "Findings, gains estimated (fakedist explain CODE)"


def finding_text(finding: Finding, cwd: str) -> str:
    """A finding in short: "FD105 the peak is ...: fused=True, at most 1.20 GiB less (train.py:7)"."""
    line = line_in_file(finding.line, cwd)
    text = "; ".join(filter(None, (f"{finding.code} {finding.text}: {finding.change}", gives_text(finding))))
    return f"{text} ({line})" if line else text


def gives_text(finding: Finding) -> str:
    """The gains of mending a finding: "1.20 GiB less, the step at most 3.10 ms shorter"; empty if none is known."""
    gives = []
    if finding.gives_high_bytes:
        is_exact = finding.gives_low_bytes == finding.gives_high_bytes
        gives.append(f"{'' if is_exact else 'at most '}{format_bytes(finding.gives_high_bytes)} less")
    if finding.gives_high_us:
        gives.append(f"the step at most {format_us(finding.gives_high_us)} shorter")
    return ", ".join(gives)


def outcome_text(advice: Advice | Remedy, *, is_short: bool = False) -> str:
    """A change's outcome: "then needs 28.20 GiB: fits; the step +19% (estimated 286 ms of recomputation)".

    Without its last part if it ``is_short``.
    """
    span = span_text(advice.needs_low_bytes, advice.needs_high_bytes)
    fits = f"then needs {span}: {advice.fits}" if advice.fits else ""
    return "; ".join(filter(None, (fits, _price(advice, is_short=is_short))))


def _price(advice: Advice | Remedy, *, is_short: bool = False) -> str:
    """How much longer a change makes the step; empty if that is not known."""
    low, high = advice.price_us, advice.price_high_us
    if low is None or high is None or advice.step_share is None or advice.step_share_high is None:
        return ""
    if not high:
        return "the step takes no longer"
    shares = f"{advice.step_share_high:.0%}"
    times = format_us(high)
    if f"{advice.step_share:.0%}" != shares:
        shares = f"{advice.step_share:.0%} to {shares}"
        times = f"{format_us(low) if low else '0'} to {times}"
    return f"the step +{shares}" + ("" if is_short else f" (estimated {times} of {advice.spent_on})")


def remedy_text(summary: Summary, *, is_short: bool = False) -> str:
    """The fewest changes after which the rank would fit, and their price; empty if none are known to be enough."""
    remedy = summary.remedy
    if remedy is None:
        return ""
    known = replace(remedy, step_share=None) if len(remedy.unpriced) == len(remedy.rules) else remedy
    unknown = f"; the price of {listed(remedy.unpriced)} is not known" if remedy.unpriced else ""
    *others, last = remedy.titles
    titles = f"{'; '.join(others)}{'; and' if others[1:] else ' and'} {last}" if others else last
    return f"{titles}: {outcome_text(known, is_short=is_short)}{unknown}"


def top_advice(summary: Summary, cwd: str) -> str:
    """The first advice, with its line of code; empty without advice."""
    if not summary.advice:
        return ""
    top = summary.advice[0]
    of = "less" if top.of == "peak_allocated_bytes" else _OF[top.of]
    line = line_in_file(top.line, cwd)
    return f"{_gives(top)} {of}, estimated: {top.title}" + (f" ({line})" if line else "")


def _gives(advice: Advice) -> str:
    if advice.is_upper_bound:
        return f"up to {format_bytes(advice.gives_bytes)}"
    low = advice.gives_bytes if advice.gives_low_bytes is None else max(advice.gives_low_bytes, 0)
    return span_text(low, advice.gives_bytes)


def or_dash(bytes_: int) -> str:
    """Bytes as text; a dash for 0."""
    return format_bytes(bytes_) if bytes_ else "-"


def run_title(run: Run) -> str:
    """The script and its arguments; of an imported run its report, of a snapshot its file."""
    if run.manifest.job is not None:
        return job_command(run.manifest.job)
    return Path(run.manifest.imported.report).name if run.manifest.imported else run.path.name


def run_facts(run: Run) -> list[tuple[str, str]]:
    """Names and texts: the job, its rank, the device, how it ended and where the run is.

    A snapshot has its file, its device and the length of its history. An imported run has its report.
    """
    summary = run.summary
    manifest = run.manifest
    page = run.path / PAGE_NAME
    where = [("run", str(run.path)), *([("page", str(page))] if page.exists() else [])]
    if run.is_snapshot:
        codes = {note.code for note in summary.notes}
        history = f"{run.num_events:,} events"
        if "snapshot_without_history" in codes:
            history = "none: what was held when the snapshot was taken is shown"
        elif "snapshot_starts_late" in codes:
            history += ", not from the beginning: an earlier peak is not known"
        others = ", one of several: --gpu-index N chooses" if "snapshot_of_several_devices" in codes else ""
        return [("file", str(run.path)), ("device", run.device + others), ("history", history)]
    if manifest.imported is not None:
        return [("report", manifest.imported.report), ("device", summary.gpu or "unknown"), *where]
    assert manifest.job is not None
    return [
        ("job", job_command(manifest.job)),
        ("rank", f"{summary.rank:,} of {summary.world_size:,} ({manifest.job.gpus_per_node} GPUs a node)"),
        ("device", f"{_device(summary)}, torch {summary.torch or 'unknown'}"),
        ("ended", ending(summary, manifest.cwd)),
        *where,
    ]


def _device(summary: Summary) -> str:
    return f"{summary.device}: {summary.gpu or 'never reached'}"


def short_facts(run: Run) -> list[tuple[str, str]]:
    """The facts of a run that its verdict does not repeat: its job, its rank and device, how it ended and its page."""
    summary = run.summary
    facts = dict(run_facts(run))
    if "rank" in facts:
        del facts["device"]
        facts["rank"] += f", {_device(summary)}"
    went_on = summary.out_of_memory is not None and summary.out_of_memory.went_on
    if verdict(summary, run.manifest.cwd) and (summary.exit.outcome is Outcome.STOPPED or went_on):
        facts.pop("ended", None)
    facts.pop("run", None)  # the last line names it
    return [*facts.items()]


_MOST_NAME = 44
_NOISE = ("void ", "at::native::", "at::cuda::", "(anonymous namespace)::")
NOT_KNOWN = "not known"
_NUM_FAMILIES = 4  # of estimates, whose accuracy is shown


def source_word(source: KernelSource) -> str:
    """Measured or estimated, and by what."""
    tools = {"cupti": "CUPTI", "nsys": "Nsight Systems", "model": "a model of the GPU"}
    return f"{source.source} by {tools.get(source.tool, source.tool)}"


def short_kernel(name: str, most: int = _MOST_NAME) -> str:
    """A kernel's name without common prefixes, cut to ``most`` characters."""
    for noise in _NOISE:
        name = name.replace(noise, "")
    return name if len(name) <= most else name[: most - 1] + "…"


def flops_rate(flops: float, duration_us: float) -> str:
    """Achieved TFLOP/s, without the unit; a dash if nothing was counted."""
    return _tera(flops / duration_us / 1e6) if flops and duration_us else "-"


def bytes_rate(moved_bytes: float, duration_us: float) -> str:
    """Achieved TB/s, without the unit; a dash if nothing was counted."""
    return _tera(moved_bytes / duration_us / 1e6) if moved_bytes and duration_us else "-"


def _tera(value: float) -> str:
    return f"{value:,.1f}" if value >= 99.95 else f"{value:.3g}"


def share_of_peak(amount: float, duration_us: float, peak: float | None) -> str:
    """The achieved rate as a share of the GPU's peak; a dash if either is unknown."""
    return f"{amount / (duration_us * 1e-6) / peak:.1%}" if amount and duration_us and peak else "-"


def us_or_dash(duration_us: float) -> str:
    """Microseconds as text; a dash for 0."""
    return format_us(duration_us) if duration_us else "-"


def unknown_time(time_us: float, num_unknown: int) -> str:
    """A time of which a part may be unknown: "not known", "3.0 ms + 2 not known"."""
    if not num_unknown:
        return us_or_dash(time_us)
    return f"{format_us(time_us)} + {num_unknown:,} {NOT_KNOWN}" if time_us else NOT_KNOWN


#: What MFU is, wherever it is printed. See :mod:`fakedist.cost_model.model_flops`.
MFU_BASIS = "model FLOPs, forward and backward, of the whole step's dense bf16 peak"


def time_figures(time: StepTime, source: KernelSource) -> list[Fact]:
    """The step's time and its parts."""
    step_us = time.step_us or 1.0
    parts = (
        ("computes", time.busy_us, f"at least one stream{_copies_alone(time)}"),
        ("communicates", time.communication_us, f"while nothing computes; {communication_word(time)}"),
        ("host late", time.launch_gap_us, "the GPU waits for a launch"),
        ("waits", time.wait_us, "for anything else, or for an unknown reason"),
        (
            "generation",
            time.generation_us,
            "the step decodes, with sampling and waits between; part of the times above",
        ),
    )
    rows = [
        Fact("step", step_text(time), step_remark(time, source), key="step_time"),
        *(
            Fact(name, format_us(us), f"{us / step_us:.1%}, {more}")
            for name, us, more in parts
            if us or name == "computes"
        ),
    ]
    copies = f"and {counted(time.num_copies, 'copy or fill', 'copies and fills')}, " if time.num_copies else ""
    whole = f"{copies}{format_us(time.kernel_us)} in total, without communication"
    rows.append(Fact("kernels", f"{time.num_kernels - time.num_copies:,}", whole))
    if (fraction := time.model_flops_utilisation) is not None and time.peaks is not None and time.flops:
        peak = format_flops(time.peaks.flops[PEAK_DTYPE])
        done = format_flops(time.model_flops)
        basis = f"{done} of the model in the time it computes, of {peak}/s ({PEAK_DTYPE}, dense){_lacking(time)}"
        rows.append(Fact("utilisation", f"{fraction:.1%}", basis))
    return [*rows, *throughput_figures(time)]


def _lacking(time: StepTime) -> str:
    num = time.num_lacking_flops
    return f"; a lower bound: the FLOPs of {num:,} kernels are not known" if num else ""


def _copies_alone(time: StepTime) -> str:
    """The part of a traced step's computing that is copies and fills alone, if that is worth a word."""
    us = time.copies_alone_us
    return f"; {format_us(us)} of it copies and fills alone" if us > _MUCH * time.busy_us else ""


#: Copies that are a smaller share of what computes go without saying.
_MUCH = 0.02


#: Figures of a step that are its answer.
ANSWERS = ("step", "MFU", "tokens/s", "samples/s")


def rate_of(time: StepTime) -> tuple[str, float]:
    """The tokens of a step per second and GPU or, where it has none, the samples; 0 if neither is certain."""
    if time.throughput is None and time.sample_throughput is not None:
        return "samples/s", time.sample_throughput.samples_per_s_per_gpu
    return "tokens/s", 0.0 if time.throughput is None else time.throughput.tokens_per_s_per_gpu


#: What exposed time does not say.
EXPOSED = "Exposed: nothing computes then. It is not what a faster network would save: see what would help"


def throughput_figures(time: StepTime) -> list[Fact]:
    """Model FLOPs utilisation of the whole step, and tokens or samples per second, as far as they are certain."""
    rows = []
    if time.step_flops_utilisation is not None and time.model_flops:
        rows.append(Fact("MFU", f"{time.step_flops_utilisation:.1%}", f"{MFU_BASIS}{_lacking(time)}"))
    unit, rate = rate_of(time)
    if done := time.throughput:
        more = f"{done.tokens_per_step:,} tokens a step, {done.tokens_from}"
    elif read := time.sample_throughput:
        more = f"{read.samples_per_step:,} samples{f' of {read.sample_shape}' if read.sample_shape else ''} a step"
    every = "per GPU, if every rank is as fast as this one"
    return [*rows, *([Fact(unit, f"{rate:,.0f}", f"{every}: {more}")] if rate else [])]


#: From this fraction on, a fall of the clock is not worth a word.
_FULL_CLOCK = 0.99


def collector_gain(time: StepTime) -> str:
    """The pauses of Python's garbage collector if avoiding them is worth it; else empty."""
    if time.collector_us < MIN_SHARE * time.step_us or not time.collector_us:
        return ""
    share = f"{time.collector_us / time.step_us:.1%}"
    return f"without garbage collection: {format_us(time.collector_us)} a step ({share}), which its time leaves out"


def collector_text(time: StepTime) -> str:
    """Advice against these pauses; empty if it is not worth it."""
    gain = collector_gain(time)
    way = "by gc.freeze() once the model is built, or gc.disable() and a gc.collect() now and then"
    return f"{gain}; {way}" if gain else ""


def clock_text(source: KernelSource) -> str:
    """The clock that a GPU's power limit leaves to a step; empty if it is the full one, or not known."""
    if source.clock is None or source.clock > _FULL_CLOCK:
        return ""
    return f"held by its power limit of {source.watts:,.0f} W at {source.clock:.0%} of the clock"


def step_remark(time: StepTime, source: KernelSource | None = None) -> str:
    """The meaning of a step's interval, a host that was not measured, and the communication not in the step's time."""
    if time.step_low_us is None:
        interval = ""
    elif time.step_high_us == time.step_us:  # nothing of it is estimated
        interval = "without the tool that slowed its host, the step is in this range"
    else:
        interval = f"90 % interval, which held for {HELD_STEPS:.0%} of published steps"
        if time.limits and time.limits[0].kind == "host":
            interval = f"90 % interval, which held for {HELD_HOST_STEPS:.0%} of published steps that the host limits"
    host = "" if source is None or source.host is None else _host_remark(source.host)
    work, on_cpu = None if source is None else source.cpu_work, ""
    if work is not None and work.high_us >= MIN_SHARE * time.step_us:
        interval = "90 % interval"  # the published steps had no such work
        span = f"{format_us(work.low_us)} to {format_us(work.high_us)}"
        on_cpu = f"{format_us(work.time_us)} ({span}) are operations on large CPU tensors, which were not run"
    return "; ".join(filter(None, (interval, host, on_cpu, without_communication(time))))


def _host_remark(host: HostTime) -> str:
    if host.source == "constant":
        return "the host was not measured"
    if host.clock is None or not (host.clock.is_recorded or host.clock.is_second_run):
        return ""
    return f"the host was measured in {'the recorded step' if host.clock.is_recorded else 'a second run'}"


def accuracy_text(source: KernelSource) -> str:
    """Accuracy of estimates of the step's main families; empty if that is not known."""
    rows = source.accuracy[:_NUM_FAMILIES]
    if not rows:
        return ""
    gpus = {row.gpu for row in rows}
    errors = [
        f"{row.family}{f' on {_gpu(row.gpu)}' if len(gpus) > 1 else ''} {row.median_error:.1%} and {row.p95_error:.1%}"
        for row in rows
    ]
    on = f" on {_gpu(rows[0].gpu)}" if len(gpus) == 1 else ""
    return f"how close, median and 95th percentile of the error{on}, on kernels that were left out: {', '.join(errors)}"


def _gpu(name: str) -> str:
    return name.upper().replace("-", " ")


def without_communication(time: StepTime) -> str:
    """The communication that a step's time does not include; empty if it includes everything."""
    if not (unknown := time.num_unknown_calls):
        return ""
    return f"without {unknown:,} of {time.num_calls:,} collectives, whose duration is {NOT_KNOWN}"
