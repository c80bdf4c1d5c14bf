"""Reports the plans for a size of memory: replayed and recorded, the change to type, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator

from fakedist.extras.plan.fitting import FitPlan, Fitted, key_of
from fakedist.options import profile_command
from fakedist.report.content.report_blocks import (
    Block,
    Fact,
    Facts,
    Items,
    Remark,
    Report,
    Sheet,
    SheetColumn,
    Verdict,
    bytes_column,
    text_column,
    us_column,
)
from fakedist.report.content.wording import run_title
from fakedist.results.verdict import relative_time, short_line, span_text, step_text
from fakedist.rundir.notes import listed
from fakedist.rundir.plain import to_plain
from fakedist.units import format_bytes, format_us_change

_UNMAPPED = (
    "How the script makes {} is not known, so these plans are replayed alone: give its flags with --apply "
    "'{}=--FLAG VALUE', or in pyproject.toml under [tool.fakedist.plan.apply]"
)
#: A recording this far from the replayed need shows that the flags do something else.
_OFF = 0.02
_NO_HOST = (
    "needs: reserved once the allocator has freed its caches; without the host: the step if the host launched in no "
    "time, which other work on this machine does not move"
)


def fit_report(fitted: Fitted) -> Report:
    """Plans for a size of memory."""
    blocks: list[Block] = [Verdict(_verdict(fitted)), _about(fitted)]
    if fitted.plans:
        blocks += [_plans(fitted), Items("The changes", [*_changes(fitted)])]
        if commands := [profile_command(plan.job) for plan in fitted.plans if plan.job]:
            blocks.append(Items("To type", commands, is_code=True))
        blocks += [Remark(text) for text in _differing(fitted)]
        if keys := [*dict.fromkeys(key for plan in fitted.plans for key in plan.unmapped)]:
            blocks.append(Remark(_UNMAPPED.format(listed(keys), keys[0])))
    return Report("plan", blocks, lambda: _object(fitted))


def best_of(fitted: Fitted) -> FitPlan | None:
    """The plan of the shortest step among those that fit when recorded, else the first that fits when replayed."""
    ran = [plan for plan in fitted.plans if _step_us(plan) is not None and _plan_object(plan)["fits"]]
    replayed = [plan for plan in fitted.plans if plan.recorded is None or plan.recorded.run is None]
    surely = [plan for plan in replayed if plan.need.fits == "fits"]
    return min(ran, key=lambda plan: _step_us(plan) or 0.0) if ran else next(iter(surely), None)


def _step_us(plan: FitPlan) -> float | None:
    if plan.recorded is None or plan.recorded.run is None or plan.recorded.run.summary.time is None:
        return None
    return plan.recorded.run.summary.time.step_us


def _verdict(fitted: Fitted) -> str:
    size, best = format_bytes(fitted.size_bytes), best_of(fitted)
    if fitted.need.fits == "fits":
        return f"Fits {size} as it is: needs {format_bytes(fitted.need.high_bytes)}"
    if best is not None:
        if best.recorded is not None and best.recorded.run is not None:
            took = f"recorded, it allocates {format_bytes(best.recorded.run.peak_allocated_bytes)}"
            return f"Fits {size} with: {listed(best.titles)}; {took}, and the step takes {_of_step(fitted, best)}"
        return f"Fits {size} with: {listed(best.titles)}; replayed, it needs {_need(best)}"
    if fitted.plans:
        return f"May fit {size}: no plan is known to, and none was recorded that does"
    nearest = fitted.nearest
    least = f"the nearest, {listed(nearest.titles)}, needs {_need(nearest)}" if nearest and nearest.changes else ""
    return f"Does not fit {size} with any of {fitted.num_tried:,} combinations of known changes; {least}".rstrip("; ")


def _need(plan: FitPlan) -> str:
    return span_text(plan.need.low_bytes, plan.need.high_bytes)


def _of_step(fitted: Fitted, plan: FitPlan) -> str:
    before, after = fitted.run.summary.time, _step_us(plan)
    return "not known" if before is None or after is None else relative_time(after, before.step_us)


def _about(fitted: Fitted) -> Facts:
    summary = fitted.run.summary
    allocated = f"{format_bytes(summary.peak_allocated_bytes)} allocated; measured, rank {summary.rank}"
    facts = [
        Fact("job", run_title(fitted.run), is_code=True),
        Fact(
            "needs",
            f"{format_bytes(summary.peak_reserved_bytes)} reserved",
            f"{allocated}; measured, rank {summary.rank}",
        ),
    ]
    if summary.time is not None:
        facts.append(Fact("step", step_text(summary.time), "estimated"))
    return Facts(facts)


def _plans(fitted: Fitted) -> Sheet:
    plans, time = fitted.plans, fitted.run.summary.time
    runs = [None if plan.recorded is None else plan.recorded.run for plan in plans]
    columns = [
        SheetColumn("plan", [str(number) for number in range(1, len(plans) + 1)]),
        text_column("needs, replayed", [_need(plan) for plan in plans]),
        text_column("step, estimated", [_priced(fitted, plan) for plan in plans]),
    ]
    if any(runs):
        columns[2:2] = [
            bytes_column("recorded, allocated", [None if run is None else run.peak_allocated_bytes for run in runs]),
            bytes_column("reserved", [None if run is None else run.peak_reserved_bytes for run in runs], rank=1),
        ]
    if any(runs) and time is not None:
        columns.append(SheetColumn("recorded", [_of_step(fitted, plan) if _step_us(plan) else "-" for plan in plans]))
        before = fitted.without_host_us
        known = [plan.recorded.without_host_us if plan.recorded else None for plan in plans]
        changes = [relative_time(us, before) if us and before else "-" for us in known]
        columns.append(SheetColumn("without the host", changes, rank=1))
        columns.append(us_column("its step", [_step_us(plan) for plan in plans], rank=2))
    columns.append(text_column("", [_outcome(fitted, plan) for plan in plans]))
    remarks = [f"plan {number}: {listed(plan.titles)}" for number, plan in enumerate(plans, 1)]
    remarks += [_NO_HOST] if any(runs) else []
    return Sheet(f"Plans of {fitted.num_tried:,} combinations, the least time first", columns, remarks)


def _priced(fitted: Fitted, plan: FitPlan) -> str:
    time = fitted.run.summary.time
    if time is None:
        return "not timed"
    low, high = (f"{us / time.step_us:+.1%}" for us in (plan.low_us, plan.high_us))
    span = low if low == high else f"{low} to {high}"
    return f"{span}, without {listed(plan.unpriced)}" if plan.unpriced else span


def _outcome(fitted: Fitted, plan: FitPlan) -> str:
    """Chosen, or why another plan is."""
    best, ran, own = best_of(fitted), plan.recorded, _step_us(plan)
    if plan is best:
        return "chosen"
    if ran is None:
        return f"not recorded: no flags for {listed(plan.unmapped)}" if plan.unmapped else plan.need.fits
    if ran.run is None:
        return f"failed: {ran.failure}"
    if not ran.run.fits:
        return "does not fit"
    least = None if best is None else _step_us(best)
    return "fits" if own is None or least is None else f"slower: {format_us_change(own - least)}"


def _changes(fitted: Fitted) -> Iterator[str]:
    """Each change of the plans, how it is made, and its line."""
    for change in dict.fromkeys(change for plan in fitted.plans for change in plan.changes):
        line = short_line(change.line, fitted.run.manifest.cwd).partition(" (")[0]
        yield f"{change.title}: {change.text}{f' ({line})' if line else ''}"


def _differing(fitted: Fitted) -> Iterator[str]:
    """Sentences on plans whose recording is not what was replayed."""
    unused = max(fitted.run.peak_reserved_bytes - fitted.run.peak_allocated_bytes, 0)
    for number, plan in enumerate(fitted.plans, 1):
        run = None if plan.recorded is None else plan.recorded.run
        if run is None:
            continue
        most = (plan.need.high_bytes - unused) * (1 + _OFF)
        if not plan.need.low_bytes * (1 - _OFF) <= run.peak_allocated_bytes <= most:
            yield f"Plan {number} does not allocate what was replayed: its flags may do something else than the change."


def _object(fitted: Fitted) -> dict[str, object]:
    best = best_of(fitted)
    return {
        "run": str(fitted.run.path),
        "size_bytes": fitted.size_bytes,
        "need": to_plain(fitted.need),
        "step_us": None if fitted.run.summary.time is None else fitted.run.summary.time.step_us,
        "num_tried": fitted.num_tried,
        "chosen": None if best is None else fitted.plans.index(best) + 1,
        "nearest": None if fitted.nearest is None else _plan_object(fitted.nearest),
        "plans": [_plan_object(plan) | {"outcome": _outcome(fitted, plan)} for plan in fitted.plans],
    }


def _plan_object(plan: FitPlan) -> dict[str, object]:
    ran = plan.recorded
    return {
        "changes": [{"key": key_of(change), "title": change.title, "text": change.text} for change in plan.changes],
        "need": to_plain(plan.need),
        "price_low_us": plan.low_us,
        "price_high_us": plan.high_us,
        "unpriced": list(plan.unpriced),
        "unmapped": list(plan.unmapped),
        "command": None if plan.job is None else profile_command(plan.job),
        "run": None if ran is None or ran.run is None else str(ran.run.path),
        "recorded_allocated_bytes": None if ran is None or ran.run is None else ran.run.peak_allocated_bytes,
        "recorded_reserved_bytes": None if ran is None or ran.run is None else ran.run.peak_reserved_bytes,
        "recorded_step_us": _step_us(plan),
        "fits": None if ran is None or ran.run is None else ran.run.fits,
        "failure": "" if ran is None else ran.failure,
    }
