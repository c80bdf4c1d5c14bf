"""Wording that terminal, page and Markdown share: the verdict, the command, how the run ended."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fakedist.job import Job
from fakedist.run.notes import Note
from fakedist.run.outcome import Outcome
from fakedist.run.sources import INDUCTORS
from fakedist.run.summary import Advice, Outside, Summary
from fakedist.units import format_bytes

#: Columns of the layer table: their categories, and their rank for leaving columns out.
LAYER_COLUMNS = {
    "params": (("parameter",), 0),
    "grads": (("gradient",), 3),
    "opt state": (("optimizer_state",), 1),
    "activations": (("activation",), 0),
    "temps": (("temporary",), 2),
    "other": (("workspace", "communication", "other"), 4),
}
_SECRET = re.compile(r"^(\w*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|_KEY)\w*)=.+", re.IGNORECASE | re.DOTALL)
_PACKAGES = re.compile(rf"^/.*/(?:site|dist)-packages/|^/.*/lib/(?=python3\.\d+/)|^/.*/(?={INDUCTORS.pattern})")
_PACKAGES_WITHIN = re.compile(r"(?<=\s)/\S*/(?:site|dist)-packages/")
MIN_SHARE = 0.001  # layers below a thousandth of the peak are left out of the folded table, and counted


@dataclass(frozen=True)
class Verdict:
    """Whether the rank fits.

    Attributes:
        fits: Whether it fits.
        word: "fits", "fits so far" (the rank broke off, or was stopped), "may not fit" or "does not fit".
        more: What follows the word.
        is_sure: Whether it depends neither on where in its span an estimate lies nor on why the rank broke off.
    """

    fits: bool
    word: str
    more: str
    is_sure: bool = True


def verdict(summary: Summary, cwd: str) -> Verdict | None:
    """Whether the rank fits the GPU; None if it never used one."""
    reserved, capacity = summary.peak_reserved_bytes, summary.capacity_bytes
    if failed := summary.out_of_memory:
        who = short_operation(failed.operation) or "an allocation"
        of = f" of {failed.layer}" if failed.layer else ""
        at = f" at {short_line(failed.line, cwd)}" if failed.line else ""
        asked = f"asked for {format_bytes(failed.requested_bytes)}{at}, with {format_bytes(failed.allocated_bytes)}"
        return Verdict(False, "does not fit", f": {who}{of} {asked} allocated")
    if capacity and reserved > capacity:
        takes = f": it takes {format_bytes(reserved)}, {format_bytes(reserved - capacity)} more than the GPU has"
        return Verdict(False, "does not fit", takes)
    if not summary.fits and not (capacity and reserved):
        return Verdict(False, "does not fit", "")
    return _beside_outside(summary) if capacity and reserved else None


def _beside_outside(summary: Summary) -> Verdict:
    """Whether reserved memory fits together with what PyTorch does not see, and how much of the GPU is left."""
    left, outside = summary.capacity_bytes - summary.peak_reserved_bytes, summary.estimated_outside
    low, high, name = (outside.low_bytes, outside.high_bytes, _outside_name(outside)) if outside else (0, 0, "")
    if not summary.fits or high > left:
        word = "may not fit" if summary.fits else "does not fit"
        more = f": {format_bytes(left)} is not reserved, but {name} takes {span_text(low, high)}, estimated"
        return Verdict(summary.fits, word, more, is_sure=not summary.fits)
    more = f", {span_text(low, high)} of it for {name}, estimated" if high else ""
    is_sure = not broke_off(summary)
    is_all = is_sure and summary.exit.outcome is not Outcome.STOPPED
    return Verdict(True, "fits" if is_all else "fits so far", f", headroom {format_bytes(left)}{more}", is_sure=is_sure)


def broke_off(summary: Summary) -> bool:
    """Whether the rank ended before its figures were complete."""
    is_complete = summary.exit.ended_well or summary.exit.outcome in (Outcome.RUNNING, Outcome.OUT_OF_MEMORY)
    return not is_complete and summary.left_during_init is None


def _outside_name(outside: Outside) -> str:
    """The parts of the memory outside the caching allocator that the estimate includes."""
    if not outside.communicators:
        return "the CUDA context"
    return "NCCL and the CUDA context" if outside.context_bytes else "NCCL"


def span_text(low: int, high: int) -> str:
    """A range of bytes: "0.49 to 1.05 GiB", "84.00 MiB to 2.10 GiB"."""
    least, most = format_bytes(low), format_bytes(high)
    if least == most:
        return most
    return f"{least.split()[0] if least.split()[1] == most.split()[1] else least} to {most}"


def job_command(job: Job) -> str:
    """The script and its arguments as typed."""
    return " ".join([("-m " if job.is_module else "") + job.target, *job.arguments])


def peak_place(summary: Summary) -> str:
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
    return " ".join([names.get(program, program), *(shlex.quote(_SECRET.sub(r"\1=...", each)) for each in command[1:])])


def ending(summary: Summary, cwd: str) -> str:
    """How the run ended, and after how many steps."""
    found, num_steps = summary.exit, len(summary.steps)
    if found.ended_by_itself and not num_steps:
        left = summary.left_during_init
        read = ""
        if left is not None and left.not_sent:
            read = f"; it read what another rank should have sent: {_within(left.not_sent, cwd)}"
            read += f"; try {left.command}" if left.command else ""
        if left is not None and left.line:
            where = short_line(left.line, cwd)
            return f"left the job during init, before a first step: exit {found.code} at {where}{read}"
        return "finished without a training step" + (f": exit {found.code}" if found.code else "") + read
    message = found.message.split(". ")[0]
    how = found.outcome.replace("_", " ") + (f" ({message})" if message else "")
    return f"{how} after {num_steps} step{'' if num_steps == 1 else 's'}"


def short_operation(operation: str) -> str:
    """An operation without the common namespace ``aten``."""
    return operation.removeprefix("aten.")


def short_line(line: str, cwd: str) -> str:
    """A source file or line, relative to the working directory or to where packages are installed."""
    return _PACKAGES.sub("", line.removeprefix(cwd.rstrip("/") + "/") if cwd else line)


def note_texts(notes: Sequence[Note], cwd: str) -> list[str]:
    """The notes' texts, with files relative to the working directory or to where packages are installed."""
    return [_within(note.text, cwd) for note in notes]


def _within(text: str, cwd: str) -> str:
    """A text that names files, with their names made short."""
    text, root = _PACKAGES_WITHIN.sub("", text), cwd.rstrip("/")
    return text.replace(f" {root}/", " ") if root else text


def layer_label(name: str, num_repeats: int = 1) -> str:
    """A layer's name in tables."""
    return (name or "(outside of modules)") + (f" x{num_repeats}" if num_repeats > 1 else "")


def advice_text(advice: Advice) -> dict[str, str]:
    """A piece of advice in words: rule, title, text, gives, of."""
    of = "reserved" if advice.of == "peak_reserved_bytes" else "allocated"
    gives = _gives(advice)
    of_peak = f"less {of} at the peak"
    return {"rule": advice.rule, "title": advice.title, "text": advice.text, "gives": gives, "of": of_peak}


def top_advice(summary: Summary, cwd: str) -> str:
    """What would lower the peak most, in one line with the line of code; empty without advice."""
    if not summary.advice:
        return ""
    top = summary.advice[0]
    reserved = " reserved" if top.of == "peak_reserved_bytes" else ""
    place = short_line(top.line, cwd).partition(" (")[0]
    return f"{_gives(top)} less{reserved}, estimated: {top.title}" + (f" ({place})" if place else "")


def _gives(advice: Advice) -> str:
    return ("up to " if advice.is_upper_bound else "") + format_bytes(advice.gives_bytes)


def or_dash(bytes_: int) -> str:
    """Bytes as text; a dash for 0."""
    return format_bytes(bytes_) if bytes_ else "-"
