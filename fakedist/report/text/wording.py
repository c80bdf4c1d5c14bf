"""Wording that terminal, page and Markdown share: the verdict, the command, how the run ended, and times in words."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fakedist.cost_model.accuracy import HELD_HOST_STEPS, HELD_STEPS
from fakedist.cost_model.breakdown import PEAK_DTYPE
from fakedist.options import Job
from fakedist.results.run import Run
from fakedist.rundir.directory import PAGE_NAME
from fakedist.rundir.notes import Note, counted, listed
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.sources import INDUCTOR_FILE
from fakedist.rundir.step_time import HostWait, KernelSource, StepLimit, StepTime
from fakedist.rundir.summary import Advice, OutOfMemory, Outside, Remedy, Summary
from fakedist.units import MIB, format_bytes, format_flops, format_us

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
_PACKAGES = re.compile(rf"^/.*/(?:site|dist)-packages/|^/.*/lib/(?=python3\.\d+/)|^/.*/(?={INDUCTOR_FILE.pattern})")
_PACKAGES_WITHIN = re.compile(r"(?<=\s)/\S*/(?:site|dist)-packages/")
MIN_SHARE = 0.001  # layers below a thousandth of the peak are left out of the folded table, and counted


@dataclass(frozen=True)
class Verdict:
    """The verdict on a rank's memory.

    Attributes:
        word: "fits", "fits so far" (the rank broke off), "may not fit" or "does not fit".
        is_sure: True if it depends neither on where in its span an estimate lies nor on why the rank broke off.
    """

    fits: bool
    word: str
    more: str
    is_sure: bool = True


def verdict(summary: Summary, cwd: str) -> Verdict | None:
    """The verdict on whether the rank fits the GPU; None if it never used one."""
    reserved, capacity = summary.peak_reserved_bytes - summary.asleep_bytes, summary.capacity_bytes
    if summary.out_of_memory is not None:
        return Verdict(False, "does not fit", f": {need_text(summary)}; {_refusal(summary.out_of_memory, cwd)}")
    if capacity and reserved > capacity:
        takes = f": it takes {format_bytes(reserved)}, {format_bytes(reserved - capacity)} more than the GPU has"
        return Verdict(False, "does not fit", takes)
    if not summary.fits and not (capacity and reserved):
        return Verdict(False, "does not fit", "")
    return _beside_outside(summary) if capacity and reserved else None


def need_text(summary: Summary) -> str:
    """The need of a rank that ran out of memory: "needs 91.80 GiB reserved (88.12 GiB allocated) of 79.11 GiB".

    The run went on beyond the GPU's memory, or it ended there and only the least is known.
    """
    failed = summary.out_of_memory
    assert failed is not None
    of = f" of {format_bytes(failed.limit_bytes or summary.capacity_bytes)}"
    outside = summary.estimated_outside
    if outside is not None and failed.limit_bytes == summary.capacity_bytes - outside.reserve_bytes > 0:
        of += " that --reserve leaves" if outside.reserve_bytes else ""
    elif failed.limit_bytes and failed.limit_bytes != summary.capacity_bytes:
        of += " that the script allows itself"
    if not failed.went_on:
        return f"needs at least {format_bytes(failed.least_bytes)}{of}"
    allocated = format_bytes(summary.peak_allocated_bytes)
    return f"needs {format_bytes(summary.peak_reserved_bytes)} reserved ({allocated} allocated){of}"


def _refusal(failed: OutOfMemory, cwd: str) -> str:
    """Where a request did not fit, and what it asked for."""
    place = [f"at {short_line(failed.line, cwd).partition(' (')[0]}"] if failed.line else []
    place += [f"step {failed.step}", failed.phase] if failed.phase else []
    place += [f"layer {failed.layer}"] if failed.layer else []
    asked = f"{format_bytes(failed.requested_bytes)} for {short_operation(failed.operation) or 'an allocation'}"
    held = f"with {format_bytes(failed.allocated_bytes)} allocated"
    return f"{'first refused' if failed.went_on else 'refused'} {', '.join([*place, asked])} {held}"


def refusal_stack(summary: Summary, cwd: str) -> list[str]:
    """The script's lines that called the one where memory did not suffice, innermost first."""
    failed = summary.out_of_memory
    return [] if failed is None else [short_line(line, cwd) for line in failed.stack[1:]]


def _beside_outside(summary: Summary) -> Verdict:
    """The verdict on reserved memory together with what PyTorch does not see, and the rest of the GPU."""
    held, outside = summary.peak_reserved_bytes - summary.asleep_bytes, summary.estimated_outside
    left = summary.capacity_bytes - held
    low, high, name = (outside.low_bytes, outside.high_bytes, _outside_name(outside)) if outside else (0, 0, "")
    source = "measured" if outside and high == outside.taken_bytes else "estimated"
    if outside and high == outside.reserve_bytes > 0:
        source, name = "by --reserve", "others"
    if not summary.fits or high > left:
        takes = "takes" if name in ("NCCL", "the CUDA context") else "take"
        word = "may not fit" if summary.fits else "does not fit"
        more = f": {format_bytes(left)} is not reserved, but {name} {takes} {span_text(low, high)}, {source}"
        if summary.fits:
            more += f"; --reserve {_whole_mib(high)} shows what PyTorch does with the rest"
        return Verdict(summary.fits, word, _retries(summary) + more, is_sure=not summary.fits)
    more = (
        f", {span_text(low, high)} of it for {name}, {source}: {span_text(left - high, left - low)} is left"
        if high
        else ""
    )
    is_sure = not broke_off(summary)
    recorded = f" ({_recorded(summary)})" if summary.exit.outcome is Outcome.STOPPED else ""
    word = "fits" if is_sure else "fits so far"
    headroom = f"{recorded}{_retries(summary)}, headroom {format_bytes(left)}{more}"
    return Verdict(True, word, headroom, is_sure=is_sure)


def _retries(summary: Summary) -> str:
    """How often the allocator runs out of memory in the timed step, and what that takes; empty if it never does."""
    time = None if summary.kernels is None else summary.kernels.allocator
    if time is None or not time.num_retries:
        return ""
    return (
        f", but PyTorch's allocator runs out of memory {counted(time.num_retries, 'time')} a step, which takes "
        f"{format_us(time.time_us + time.wait_us)} to give back {format_bytes(time.given_back_bytes)} of its cache, "
        "estimated"
    )


def _whole_mib(num_bytes: int) -> str:
    """A size that ``--reserve`` takes, rounded up."""
    return f"{-(-num_bytes // MIB)}MiB"


def _recorded(summary: Summary) -> str:
    """The steps of a run that was stopped after them, and the parts of the script that did not run."""
    notes = [note.text for note in summary.notes if note.code == "stopped_before_the_end"]
    missing = [part for part in ("validation", "saving") if any(part in text for text in notes)]
    steps = counted(len(summary.steps), "step")
    return f"{steps} recorded" + (f"; {listed(missing)} did not run" if missing else "")


def broke_off(summary: Summary) -> bool:
    """True if the rank ended before its figures were complete."""
    is_complete = summary.exit.ended_well or summary.exit.outcome in (Outcome.RUNNING, Outcome.OUT_OF_MEMORY)
    return not is_complete and summary.left_during_init is None


_BROKE_OFF = {
    Outcome.EXCEPTION: "the script failed",
    Outcome.EXIT: "the script exited",
    Outcome.FAULT: "fakedist failed",
    Outcome.INTERRUPTED: "the interruption",
    Outcome.TIMEOUT: "the time limit",
    Outcome.KILLED: "it was killed",
}


def timed_step_name(summary: Summary, step: int) -> str:
    """The timed step, and how a run that broke off went on from it.

    "step 2"; "step 3, the last complete one before the script failed".
    """
    how = _BROKE_OFF.get(summary.exit.outcome)
    if how is None or not broke_off(summary):
        return f"step {step}"
    is_last = step == max((ended.step for ended in summary.steps), default=0)
    return f"step {step}, the last {'complete' if is_last else 'timed'} one before {how}"


def step_verdict(summary: Summary) -> str:
    """Name what limits the timed step, in a sentence: "the step, estimated: limited by ..."; empty if not known."""
    if summary.timed is None or not (limit := limit_text(summary.timed[0])):
        return ""
    source = summary.timed[1]
    name = timed_step_name(summary, source.step)
    return f"{name if ',' in name else 'the step'}, {step_word(source)}: {limit}"


def _outside_name(outside: Outside) -> str:
    names = [*outside.taken, *(["NCCL"] if outside.communicators else [])]
    if outside.context_bytes or not names:
        names.append("the CUDA context")
    return listed(names)


def span_text(low: int, high: int) -> str:
    """A range of bytes: "0.49 to 1.05 GiB", "84.00 MiB to 2.10 GiB"."""
    least, most = format_bytes(low), format_bytes(high)
    if least == most:
        return most
    return f"{least.split()[0] if least.split()[1] == most.split()[1] else least} to {most}"


def job_command(job: Job) -> str:
    """The script and its arguments as typed."""
    return " ".join([("-m " if job.is_module else "") + job.target, *job.arguments])


def peak_moment(summary: Summary) -> str:
    """Step and phase of the peak; empty if they are unknown."""
    return f"step {summary.peak_step}, {summary.peak_phase}" if summary.peak_phase else ""


def peaks_text(summary: Summary) -> str:
    """Both peaks: "14.15 GiB allocated, 20.05 GiB reserved"."""
    allocated, reserved = summary.peak_allocated_bytes, summary.peak_reserved_bytes
    return f"{format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"


def command_line(command: list[str]) -> str:
    """The whole command, ready to be typed again, without values that are named as secrets: pages are mailed."""
    program = Path(command[0]).name if command else ""
    names = {"__main__.py": "python -m fakedist", "cli.py": "python cli.py"}
    return " ".join([names.get(program, program), *(shlex.quote(_SECRET.sub(r"\1=...", word)) for word in command[1:])])


def ending(summary: Summary, cwd: str) -> str:
    """The run's end, and the number of its steps."""
    exit_, num_steps = summary.exit, len(summary.steps)
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
    message = exit_.message.split(". ")[0]
    how = exit_.outcome.replace("_", " ") + (f" ({message})" if message else "")
    return f"{how} after {num_steps} step{'' if num_steps == 1 else 's'}"


def short_operation(operation: str) -> str:
    """An operation without the common namespace ``aten``."""
    return operation.removeprefix("aten.")


def short_line(line: str, cwd: str) -> str:
    """A source file or line, relative to the working directory or to where packages are installed."""
    within = _PACKAGES.sub("", line)
    return within.removeprefix(cwd.rstrip("/") + "/") if cwd else within


def note_texts(notes: Sequence[Note], cwd: str) -> list[str]:
    """The notes' texts, with files relative to the working directory or to where packages are installed."""
    return [_within(note.text, cwd) for note in notes]


def _within(text: str, cwd: str) -> str:
    text, root = _PACKAGES_WITHIN.sub("", text), cwd.rstrip("/")
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


def advice_text(advice: Advice, summary: Summary) -> dict[str, str]:
    """A piece of advice in words: rule, title, text, gives, of, then (its outcome if the rank does not fit; price)."""
    gives = _gives(advice)
    at_peak = " at the peak" if advice.of.startswith("peak_") else ""
    of_peak = f"{_OF[advice.of]}{at_peak}{'' if gives_alone(advice) else ' by itself'}"
    then = _price(advice) if summary.fits else outcome_text(advice)
    return {
        "rule": advice.rule,
        "title": advice.title,
        "text": advice.text,
        "gives": gives,
        "of": of_peak,
        "then": then,
    }


def gives_alone(advice: Advice) -> bool:
    """True for a change that lowers the peak by itself, not only once another has."""
    return advice.gives_bytes > 0


def advice_line(advice: Advice, summary: Summary) -> str:
    """A piece of advice in short: "7.32 GiB less allocated: checkpoint layers.0-79; the step +24% to 29%"."""
    then = _price(advice, is_short=True) if summary.fits else outcome_text(advice, is_short=True)
    return "; ".join(filter(None, (f"{_gives(advice)} {_OF[advice.of]}: {advice.title}", then)))


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
    shares, times = f"{advice.step_share_high:.0%}", format_us(high)
    if f"{advice.step_share:.0%}" != shares:
        shares, times = f"{advice.step_share:.0%} to {shares}", f"{format_us(low) if low else '0'} to {times}"
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
    line = short_line(top.line, cwd).partition(" (")[0]
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
    summary, manifest, page = run.summary, run.manifest, run.path / PAGE_NAME
    where = [("run", str(run.path)), *([("page", str(page))] if page.exists() else [])]
    if run.is_snapshot:
        return [("file", str(run.path)), ("device", run.device), ("history", f"{run.num_rows('events'):,} events")]
    if manifest.imported is not None:
        return [("report", manifest.imported.report), ("device", summary.gpu or "unknown"), *where]
    assert manifest.job is not None
    return [
        ("job", job_command(manifest.job)),
        ("rank", f"{summary.rank:,} of {summary.world_size:,} ({manifest.job.gpus_per_node} GPUs a node)"),
        ("device", f"{summary.device}: {summary.gpu or 'never reached'}, torch {summary.torch or 'unknown'}"),
        ("ended", ending(summary, manifest.cwd)),
        *where,
    ]


def short_facts(run: Run) -> list[tuple[str, str]]:
    """The facts of a run that its verdict does not repeat: its job, its rank and device, how it ended and its page."""
    summary, facts = run.summary, dict(run_facts(run))
    if "rank" in facts:
        facts["rank"] += f", {facts.pop('device').partition(', torch ')[0]}"
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


def step_word(source: KernelSource) -> str:
    """Source of a step's length: estimated once its collectives are, even between measured kernels."""
    return "estimated" if source.source == "measured" and source.fabric else source.source


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


def main_bound(compute_us: float, memory_us: float, launch_us: float) -> str:
    """The bound that limits most of a row's time, and its share: "memory 62%"; empty if unknown."""
    bounds = {"compute": compute_us, "memory": memory_us, "launch": launch_us}
    name = max(bounds, key=lambda bound: bounds[bound])
    return f"{name} {bounds[name] / sum(bounds.values()):.0%}" if bounds[name] else ""


def unknown_time(time_us: float, num_unknown: int) -> str:
    """A time of which a part may be unknown: "not known", "3.0 ms + 2 not known"."""
    if not num_unknown:
        return us_or_dash(time_us)
    return f"{format_us(time_us)} + {num_unknown:,} {NOT_KNOWN}" if time_us else NOT_KNOWN


#: What MFU is, wherever it is printed. See :mod:`fakedist.cost_model.model_flops`.
MFU_BASIS = "model FLOPs, forward and backward, of the whole step's dense bf16 peak"


def time_figures(time: StepTime, source: KernelSource) -> list[tuple[str, str, str]]:
    """The step's time and its parts: name, figure, more."""
    step_us = time.step_us or 1.0
    rows = [("step", step_text(time), step_remark(time, source))]
    for name, us, more in (
        ("computes", time.busy_us, f"at least one stream{_copies_alone(time)}"),
        ("communicates", time.communication_us, f"while nothing computes; {communication_word(time)}"),
        ("host late", time.launch_gap_us, "the GPU waits for a launch"),
        ("waits", time.wait_us, "for anything else, or for an unknown reason"),
    ):
        if us or name == "computes":
            rows.append((name, format_us(us), f"{us / step_us:.1%}, {more}"))
    if us := time.generation_us:
        more = "the step decodes, with sampling and waits between; part of the times above"
        rows.append(("generation", format_us(us), f"{us / step_us:.1%}, {more}"))
    rows.append(("kernels", f"{time.num_kernels:,}", f"{format_us(time.kernel_us)} in total, without communication"))
    if text := utilisation(time):
        rows.append(("utilisation", *text))
    return [*rows, *throughput_figures(time)]


def _copies_alone(time: StepTime) -> str:
    """The part of a traced step's computing that is copies and fills alone, if that is worth a word."""
    us = time.copies_alone_us
    return f"; {format_us(us)} of it copies and fills alone" if us > _MUCH * time.busy_us else ""


#: Copies that are a smaller share of what computes go without saying.
_MUCH = 0.02


def short_time_figures(time: StepTime, source: KernelSource) -> list[tuple[str, str, str]]:
    """The step's time, MFU, and tokens or samples per second: name, figure, more."""
    rows = [("step", step_text(time), step_remark(time, source))]
    if (utilised := time.step_flops_utilisation) is not None and time.model_flops:
        lacking = f"a lower bound: {time.num_lacking_flops:,} kernels lack FLOPs" if time.num_lacking_flops else ""
        rows.append(("MFU", f"{utilised:.1%}", "; ".join(filter(None, (MFU_BASIS, lacking)))))
    unit, rate = rate_of(time)
    return [*rows, (unit, f"{rate:,.0f}", "per GPU if all ranks keep pace")] if rate else rows


def rate_of(time: StepTime) -> tuple[str, float]:
    """The tokens of a step per second and GPU or, where it has none, the samples; 0 if neither is certain."""
    if time.throughput is None and time.sample_throughput is not None:
        return "samples/s", time.sample_throughput.samples_per_s_per_gpu
    return "tokens/s", 0.0 if time.throughput is None else time.throughput.tokens_per_s_per_gpu


#: What exposed time does not say.
EXPOSED = "Exposed: nothing computes then. It is not what a faster network would save: see what would help"
_EVERY_RANK = "if every rank is as fast as this one"


def throughput_figures(time: StepTime) -> list[tuple[str, str, str]]:
    """Model FLOPs utilisation of the whole step, and tokens or samples per second, as far as they are certain."""
    rows = []
    if time.step_flops_utilisation is not None and time.model_flops:
        lacking = f"; a lower bound: {time.num_lacking_flops:,} kernels lack FLOPs" if time.num_lacking_flops else ""
        rows.append(("MFU", f"{time.step_flops_utilisation:.1%}", f"{MFU_BASIS}{lacking}"))
    if done := time.throughput:
        more = f"per GPU, {_EVERY_RANK}: {done.tokens_per_step:,} tokens a step, {done.tokens_from}"
        rows.append(("tokens/s", f"{done.tokens_per_s_per_gpu:,.0f}", more))
    elif read := time.sample_throughput:
        shape = f" of {read.sample_shape}" if read.sample_shape else ""
        more = f"per GPU, {_EVERY_RANK}: {read.samples_per_step:,} samples{shape} a step"
        rows.append(("samples/s", f"{read.samples_per_s_per_gpu:,.0f}", more))
    return rows


#: From this fraction on, a fall of the clock is not worth a word.
_FULL_CLOCK = 0.99
_BOUNDS = ("compute", "memory", "launch")
_PathKind = Literal["kernels", "collectives", "host", "idle"]


def limit_text(time: StepTime) -> str:
    """Name what limits the step, and what would lift it: one change, and the best two; empty if not known.

    "limited by dp over the NICs or kernels (compute 81%); twice the NIC bandwidth: -4.7%; b200 and ...: -30.0%"
    """
    parts: dict[tuple[_PathKind, str], float] = {}
    for part in time.critical_path:
        parts[part.kind, part.group] = parts.get((part.kind, part.group), 0.0) + part.time_us
    if not parts or not time.step_us:
        return ""
    kind, group = max(parts, key=lambda key: parts[key])
    if kind == "host" and (waits := waits_limit(time)):
        return f"limited by {waits}"
    limits = tied_limits(time)
    words = f"limited by {limit_names(limits, time)}" if limits else ""
    if not limits and kind != "idle":  # of an older run, only the critical path is known
        num_nodes = max((row.num_nodes for row in time.by_group if row.group == group), default=0)
        limits = [StepLimit(kind, group, num_nodes, math.nan, math.nan, math.nan)]
    name = limit_names(limits, time) if limits else "waits for an unknown reason"
    words = words or f"limited by {name}: {parts[kind, group] / time.step_us:.0%} of the critical path"
    lifted = [gain for gain in time.gains if limits and gain.option.startswith(lifting_option(limits[0]))]
    gains = [*lifted[:1], *(gain for gain in time.gains if gain.is_pair)]
    changes = [f"{gain.title}: {relative_time(gain.step_us, time.step_us)}" for gain in gains]
    return "; ".join([words, *dict.fromkeys(changes)])


def tied_limits(time: StepTime) -> list[StepLimit]:
    """The longest limit of a step, and those that it is not certain to exceed: either lies in the other's interval.

    All groups over the NICs stand for each of them.
    """
    tied = [
        limit
        for limit in time.limits
        if time.limits[0].low_us <= limit.step_us or time.limits[0].step_us <= limit.high_us
    ]
    has_nics = any(limit.kind == "nics" for limit in tied)
    return [limit for limit in tied if not (has_nics and limit.kind == "collectives" and limit.num_nodes > 1)]


def limit_names(limits: Sequence[StepLimit], time: StepTime | None = None) -> str:
    """Limits in words: "dp over the NICs, the host or kernels (compute 81%)"."""
    if time is not None and [limit.kind for limit in limits] == ["host"]:
        return "late launches of the host"
    *names, last = (limit_name(limit, time) for limit in limits)
    return " or ".join(filter(None, (", ".join(names), last)))


def limit_name(limit: StepLimit, time: StepTime | None = None) -> str:
    """A limit in words: "kernels", "dp over the NICs"; with the step, "kernels (compute 81%)"."""
    by_bound = {} if time is None else time.by_bound
    bound = main_bound(*(by_bound.get(bound, 0.0) for bound in _BOUNDS))
    return {
        "kernels": f"kernels ({bound})" if bound else "kernels",
        "collectives": f"{limit.group} over {'the NICs' if limit.num_nodes > 1 else 'the links of a node'}",
        "nics": "all groups over the NICs",
        "host": "the host",
    }[limit.kind]


def lifting_option(limit: StepLimit) -> str:
    """The beginning of the option of ``fakedist time`` that makes just one limit less."""
    links = "--what-if bandwidth=nvlink:2x" if limit.num_nodes == 1 else "--what-if bandwidth=2x"
    return {"kernels": "--gpu ", "host": "--what-if no-host-waits"}.get(limit.kind, links)


def limits_text(time: StepTime) -> str:
    """The limits of a step side by side; empty if they are not known."""
    limits = [f"{limit_name(limit)} {format_us(limit.step_us)}" for limit in time.limits]
    return f"on its own, each part would take: {', '.join(limits)}" if limits else ""


def waits_limit(time: StepTime) -> str:
    """The line where the host waits for the GPU most, if its waits make most of the launches late; else empty.

    "a host that waits for the GPU: 183 times a step at token_dispatcher.py:412 (_to_copy), 310 of 340 ms of idle GPU"
    """
    idle_us = sum(wait.idle_us for wait in time.host_waits)
    if 2 * idle_us <= time.launch_gap_us or not time.host_waits:
        return ""
    most = time.host_waits[0]
    times = "once" if most.num_waits == 1 else f"{most.num_waits:,} times"
    location = most.line.partition(" (")[0].rpartition("/")[2]
    where = f" {'after' if most.is_after else 'at'} {location}" if location else ""
    gain = next((gain for gain in time.gains if gain.option == "--what-if no-sync"), None)
    changes = "" if gain is None else f"; {gain.title}: {relative_time(gain.step_us, time.step_us)}"
    idle = f"{format_us(most.idle_us)} of {format_us(time.launch_gap_us)} of idle GPU"
    return f"a host that waits for the GPU: {times} a step{where} ({wait_word(most)}), {idle}{changes}"


def wait_word(wait: HostWait) -> str:
    """The operation that waits, in short: ".item()", "_to_copy", "synchronize (stream)"."""
    name = short_operation(wait.operation).partition(".")[0]
    return ".item()" if name == "_local_scalar_dense" else name


def collector_text(time: StepTime) -> str:
    """Advice against pauses of Python's garbage collector that are worth it; else empty."""
    if time.collector_us < MIN_SHARE * time.step_us or not time.collector_us:
        return ""
    return (
        f"without garbage collection: {format_us(time.collector_us)} a step ({time.collector_us / time.step_us:.1%}), "
        "which its time leaves out; by gc.freeze() once the model is built, or gc.disable() and a gc.collect() now and "
        "then"
    )


def clock_text(source: KernelSource) -> str:
    """The clock that a GPU's power limit leaves to a step; empty if it is the full one, or not known."""
    if source.clock is None or source.clock > _FULL_CLOCK:
        return ""
    return f"held by its power limit of {source.watts:,.0f} W at {source.clock:.0%} of the clock"


def relative_time(step_us: float, before_us: float, digits: int = 1) -> str:
    """The change of a step in percent: "-6.8%"."""
    change = f"{step_us / before_us - 1:+.{digits}%}" if before_us else ""
    return change if change.strip("+-0.%") else change.lstrip("+-")


def step_text(time: StepTime) -> str:
    """The step's time with its interval: "2.71 s (2.50 to 3.00)"; without one "2.71 s"."""
    if time.step_low_us is None or time.step_high_us is None:
        return format_us(time.step_us)
    return span_us(time.step_us, time.step_low_us, time.step_high_us)


def span_us(time_us: float, low_us: float, high_us: float) -> str:
    """Microseconds with their interval: "2.71 s (2.50 to 3.00)"."""
    low, high, time = format_us(low_us), format_us(high_us), format_us(time_us)
    unit = time.rpartition(" ")[2]
    if all(text.endswith(f" {unit}") and text.count(" ") == 1 for text in (low, high, time)):
        low, high = low.split()[0], high.split()[0]
    return f"{time} ({low} to {high})"


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
    is_constant = source is not None and source.host is not None and source.host.source == "constant"
    host = "the host was not measured" if is_constant else ""
    return "; ".join(filter(None, (interval, host, without_communication(time))))


def utilisation(time: StepTime) -> tuple[str, str] | None:
    """Model FLOPs utilisation of compute, and what it refers to; None if it is unknown."""
    fraction = time.model_flops_utilisation
    if fraction is None or time.peaks is None or not time.flops:
        return None
    peak = format_flops(time.peaks.flops[PEAK_DTYPE])
    lacking = time.num_lacking_flops
    least = f"; a lower bound: the FLOPs of {lacking:,} kernels are not known" if lacking else ""
    basis = f"{format_flops(time.model_flops)} of the model in the time it computes, of {peak}/s ({PEAK_DTYPE}, dense)"
    return f"{fraction:.1%}", basis + least


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


def communication_word(time: StepTime) -> str:
    """Source of the time of collectives: the model, NCCL's own kernels, or the copies that stand for them."""
    return "measured" if time.has_real_collectives else "estimated" if time.by_group else "simulated"


def without_communication(time: StepTime) -> str:
    """The communication that a step's time does not include; empty if it includes everything."""
    if not (unknown := time.num_unknown_calls):
        return ""
    return f"without {unknown:,} of {time.num_calls:,} collectives, whose duration is {NOT_KNOWN}"
