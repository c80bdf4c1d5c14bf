"""The verdict on a run in words: whether its rank fits, what its step takes, and what limits that."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fakedist.rundir.notes import counted, listed
from fakedist.rundir.outcome import Outcome
from fakedist.rundir.sources import INDUCTOR_FILE
from fakedist.rundir.step_time import HostWait, KernelSource, PathKind, StepLimit, StepTime
from fakedist.rundir.summary import OutOfMemory, Outside, Summary
from fakedist.units import MIB, format_bytes, format_us

_PACKAGES = re.compile(rf"^/.*/(?:site|dist)-packages/|^/.*/lib/(?=python3\.\d+/)|^/.*/(?={INDUCTOR_FILE.pattern})")


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
    reserved = summary.peak_reserved_bytes - summary.asleep_bytes
    capacity = summary.capacity_bytes
    if summary.out_of_memory is not None:
        return Verdict(False, "does not fit", f": {need_text(summary)}; {_refusal(summary.out_of_memory, cwd)}")
    if capacity and reserved > capacity:
        takes = f": it takes {format_bytes(reserved)}, {format_bytes(reserved - capacity)} more than the GPU has"
        return Verdict(False, "does not fit", takes)
    if not summary.fits and not (capacity and reserved):
        return Verdict(False, "does not fit", "")
    return _beside_outside(summary) if capacity and reserved else None


#: Of a GPU's memory, the share up to which its use leaves room: memory then limits nothing.
_ROOMY = 0.5


def has_room(summary: Summary) -> bool:
    """Whether a rank leaves half of its GPU's memory free, so that a shorter step helps more than less memory."""
    high = summary.estimated_outside.high_bytes if summary.estimated_outside else 0
    return summary.fits and summary.peak_reserved_bytes + high <= _ROOMY * summary.capacity_bytes


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
    place = [f"at {line_in_file(failed.line, cwd)}"] if failed.line else []
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
    held = summary.peak_reserved_bytes - summary.asleep_bytes
    outside = summary.estimated_outside
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
    """The timed step, and how a run that broke off went on from it; of a file without steps, that it is all of it.

    "step 2"; "step 3, the last complete one before the script failed".
    """
    if summary.kernels is not None and any(note.code == "no_steps_traced" for note in summary.kernels.notes):
        return "the whole file"
    how = _BROKE_OFF.get(summary.exit.outcome)
    if how is None or not broke_off(summary):
        return f"step {step}"
    is_last = step == max((ended.step for ended in summary.steps), default=0)
    return f"step {step}, the last {'complete' if is_last else 'timed'} one before {how}"


def step_verdict(summary: Summary) -> tuple[str, str] | None:
    """The timed step's name, and what limits it: "the step, estimated", "limited by ..."; None if not known."""
    if summary.timed is None or not (limit := limit_text(summary.timed[0])):
        return None
    source = summary.timed[1]
    name = timed_step_name(summary, source.step)
    return f"{name if ',' in name else 'the step'}, {step_word(source)}", limit


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


def short_operation(operation: str) -> str:
    """An operation without the common namespace ``aten``."""
    return operation.removeprefix("aten.")


def short_line(line: str, cwd: str) -> str:
    """A source file or line, relative to the working directory or to where packages are installed."""
    within = _PACKAGES.sub("", line)
    return within.removeprefix(cwd.rstrip("/") + "/") if cwd else within


def line_in_file(line: str, cwd: str) -> str:
    """A source line as :func:`short_line` has it, without its function."""
    return short_line(line, cwd).partition(" (")[0]


def step_word(source: KernelSource) -> str:
    """Source of a step's length: estimated once its collectives are, even between measured kernels."""
    return "estimated" if source.source == "measured" and source.fabric else source.source


def main_bound(compute_us: float, memory_us: float, launch_us: float) -> str:
    """The bound that limits most of a row's time, and its share: "memory 62%"; empty if unknown."""
    bounds = {"compute": compute_us, "memory": memory_us, "launch": launch_us}
    name = max(bounds, key=lambda bound: bounds[bound])
    return f"{name} {bounds[name] / sum(bounds.values()):.0%}" if bounds[name] else ""


_BOUNDS = ("compute", "memory", "launch")


def limit_text(time: StepTime) -> str:
    """Name what limits the step, and what would lift it: one change, and the best two; empty if not known.

    "limited by dp over the NICs or kernels (compute 81%); twice the NIC bandwidth: -4.7%; b200 and ...: -30.0%"
    """
    parts: dict[tuple[PathKind, str], float] = {}
    for part in time.critical_path:
        kind: PathKind = "host" if part.kind == "launch" else part.kind
        parts[kind, part.group] = parts.get((kind, part.group), 0.0) + part.time_us
    if not parts or not time.step_us:
        return ""
    kind, group = max(parts, key=lambda key: parts[key])
    if kind == "host" and (waits := waits_limit(time)):
        return f"limited by {waits}"
    limits = tied_limits(time)
    words = f"limited by {limit_names(limits, time)}" if limits else ""
    if not limits and kind != "idle" and kind != "launch":  # of an older run, only the critical path is known
        num_nodes = max((row.num_nodes for row in time.by_group if row.group == group), default=0)
        limits = [StepLimit(kind, group, num_nodes, math.nan, math.nan, math.nan)]
    name = limit_names(limits, time) if limits else "waits for an unknown reason"
    words = words or f"limited by {name}: {parts[kind, group] / time.step_us:.0%} of the critical path"
    lifted = [gain for gain in time.gains if limits and gain.option.startswith(" ".join(lifting_option(limits[0])))]
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
        "collectives": f"{limit.group or 'collectives'}{_over(limit.num_nodes)}",
        "nics": "all groups over the NICs",
        "host": "the host",
    }[limit.kind]


def _over(num_nodes: int) -> str:
    """Over what a group communicates; empty if its nodes are not known, as in a trace."""
    return f" over {'the NICs' if num_nodes > 1 else 'the links of a node'}" if num_nodes else ""


def lifting_option(limit: StepLimit) -> tuple[str, str]:
    """The option of ``fakedist time`` that makes just one limit less, and its value; of kernels, any GPU."""
    links = "bandwidth=nvlink:2x" if limit.num_nodes == 1 else "bandwidth=2x"
    return {"kernels": ("--gpu", ""), "host": ("--what-if", "no-host-waits")}.get(limit.kind, ("--what-if", links))


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


def relative_time(step_us: float, before_us: float, digits: int = 1) -> str:
    """The change of a step in percent: "-6.8%"."""
    change = f"{step_us / before_us - 1:+.{digits}%}" if before_us else ""
    return change if change.strip("+-0.%") else change.lstrip("+-")


def step_text(time: StepTime) -> str:
    """The step's time with its interval: "2.71 s (2.50 to 3.00)"; without one "2.71 s"."""
    return span_us(time.step_us, time.step_low_us, time.step_high_us)


def span_us(time_us: float, low_us: float | None, high_us: float | None) -> str:
    """Microseconds with their interval: "2.71 s (2.50 to 3.00)"."""
    return f"{format_us(time_us)} {interval_text(time_us, low_us, high_us)}".rstrip()


def interval_text(time_us: float, low_us: float | None, high_us: float | None) -> str:
    """The interval of a time, in its unit if that is possible: "(2.50 to 3.00)"; empty without one."""
    if low_us is None or high_us is None:
        return ""
    low, high, time = format_us(low_us), format_us(high_us), format_us(time_us)
    unit = time.rpartition(" ")[2]
    if all(text.endswith(f" {unit}") and text.count(" ") == 1 for text in (low, high, time)):
        low, high = low.split()[0], high.split()[0]
    return f"({low} to {high})"


def communication_word(time: StepTime) -> str:
    """Source of the time of collectives: the model, NCCL's own kernels, or the copies that stand for them."""
    return "measured" if time.has_real_collectives else "estimated" if time.by_group else "simulated"
