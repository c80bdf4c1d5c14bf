"""Times in words, for the terminal, the page and Markdown."""

from __future__ import annotations

from fakedist.analysis.times.totals import PEAK_DTYPE
from fakedist.run.step_time import KernelSource, StepTime
from fakedist.units import format_flops, format_us

_MOST_NAME = 44
_NOISE = ("void ", "at::native::", "at::cuda::", "(anonymous namespace)::")
NOT_KNOWN = "not known"
_NUM_FAMILIES = 4  # of estimates, whose accuracy is shown


def source_word(source: KernelSource) -> str:
    """Measured or estimated, and by what."""
    tools = {"cupti": "CUPTI", "nsys": "Nsight Systems", "model": "a model of the GPU"}
    return f"{source.source} by {tools.get(source.tool, source.tool)}"


def step_word(source: KernelSource) -> str:
    """Where a step's length comes from: estimated once its collectives are, even between measured kernels."""
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
    name = max(bounds, key=lambda each: bounds[each])
    return f"{name} {bounds[name] / sum(bounds.values()):.0%}" if bounds[name] else ""


def unknown_time(time_us: float, num_unknown: int) -> str:
    """A time of which a part may be unknown: "not known", "3.0 ms + 2 not known"."""
    if not num_unknown:
        return us_or_dash(time_us)
    return f"{format_us(time_us)} + {num_unknown:,} {NOT_KNOWN}" if time_us else NOT_KNOWN


def time_figures(time: StepTime) -> list[tuple[str, str, str]]:
    """The step's time and its parts: name, figure, more."""
    step_us = time.step_us or 1.0
    rows = [("step", step_text(time), step_remark(time))]
    for name, us, more in (
        ("computes", time.busy_us, "at least one stream"),
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
    return rows


def step_text(time: StepTime) -> str:
    """The step's time with its interval: "2.71 s (2.50 to 3.00)"; without one "2.71 s"."""
    step = format_us(time.step_us)
    if time.step_low_us is None or time.step_high_us is None:
        return step
    low, high, unit = format_us(time.step_low_us), format_us(time.step_high_us), step.rpartition(" ")[2]
    if all(text.endswith(f" {unit}") and text.count(" ") == 1 for text in (low, high, step)):
        low, high = low.split()[0], high.split()[0]
    return f"{step} ({low} to {high})"


def step_remark(time: StepTime) -> str:
    """What the interval of a step means, and what its time does not include."""
    interval = "" if time.step_low_us is None else "the true step is in this range in 9 of 10 cases"
    return "; ".join(filter(None, (interval, without_communication(time))))


def utilisation(time: StepTime) -> tuple[str, str] | None:
    """Model FLOPs utilisation of compute, and what it refers to; None if it is unknown."""
    share = time.model_flops_utilisation
    if share is None or time.peaks is None or not time.flops:
        return None
    peak = format_flops(time.peaks.flops[PEAK_DTYPE])
    lacking = time.num_lacking_flops
    least = f"; a lower bound: the FLOPs of {lacking:,} kernels are not known" if lacking else ""
    what = f"{format_flops(time.model_flops)} of the model in the time it computes, of {peak}/s ({PEAK_DTYPE}, dense)"
    return f"{share:.1%}", what + least


def accuracy_text(source: KernelSource) -> str:
    """How close estimates of the step's main families are; empty if that is not known."""
    rows = source.accuracy[:_NUM_FAMILIES]
    if not rows:
        return ""
    gpus = {row.gpu for row in rows}
    told = [
        f"{row.family}{f' on {_gpu(row.gpu)}' if len(gpus) > 1 else ''} {row.median_error:.1%} and {row.p95_error:.1%}"
        for row in rows
    ]
    on = f" on {_gpu(rows[0].gpu)}" if len(gpus) == 1 else ""
    return f"how close, median and 95th percentile of the error{on}, on kernels that were left out: {', '.join(told)}"


def _gpu(name: str) -> str:
    return name.upper().replace("-", " ")


def communication_word(time: StepTime) -> str:
    """Where the time of collectives comes from: the model's, or that of the copies that stand for them."""
    return "estimated" if time.by_group else "simulated"


def without_communication(time: StepTime) -> str:
    """The communication that a step's time does not include; empty if it includes everything."""
    if not (unknown := time.num_unknown_calls):
        return ""
    return f"without {unknown:,} of {time.num_calls:,} collectives, whose duration is {NOT_KNOWN}"
