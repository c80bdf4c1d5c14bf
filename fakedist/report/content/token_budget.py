"""Reports the training on a number of tokens: time, GPU-hours, energy and cost."""

from __future__ import annotations

from collections.abc import Callable

from fakedist.report.content.report_blocks import Block, Fact, Facts, Remark, Report
from fakedist.results.token_budget import Estimate, TokenBudget
from fakedist.rundir.plain import to_plain
from fakedist.units import format_number

_STEPS_ALONE = (
    "Every step of the budget takes as long as this one, without checkpoints, evaluation, failures and restarts."
)
_ALL_ALIKE = " One rank stands for all."
#: The largest unit that a figure has once of.
_DURATIONS = ((24.0, "days"), (1.0, "h"), (1 / 60, "min"), (1 / 3600, "s"))
_ENERGIES = ((1e6, "GWh"), (1e3, "MWh"), (1.0, "kWh"))


def budget_report(budget: TokenBudget) -> Report:
    """The figures of a token budget."""
    per_step = f"{budget.num_steps:,} steps of {budget.tokens_per_step:,} tokens"
    gpus = f"on {budget.num_gpus:,} {budget.gpu}"
    limit = f"each GPU at its power limit of {budget.board_watts:,.0f} W; hosts, network and cooling not included"
    facts = [
        Fact("GPU-hours", _spanned(budget.gpu_hours, _number), f"{gpus}, 90 % interval of the step"),
        Fact("time", _spanned(budget.hours, _in(_DURATIONS)), per_step),
        Fact("energy, at most", _spanned(budget.most_kwh, _in(_ENERGIES)), limit),
    ]
    if budget.cost is not None and budget.price is not None:
        facts.append(Fact("cost", _spanned(budget.cost, _number), f"at {budget.price:,.2f} for a GPU-hour"))
    blocks: list[Block] = [Facts(facts, f"Training on {_tokens(budget.tokens)} tokens, estimated")]
    if not budget.fits:
        blocks.append(Remark("The job does not fit its GPUs: these are the figures of one that would.", True))
    blocks.append(Remark(_STEPS_ALONE + _ALL_ALIKE * budget.is_alone))
    return Report("token_budget", blocks, lambda: to_plain(budget))


def _tokens(number: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= size:
            return f"{number / size:g}{letter}"
    return f"{number:,}"


def _number(value: float, _: float) -> str:
    return format_number(value)


def _in(units: tuple[tuple[float, str], ...]) -> Callable[[float, float], str]:
    def text(value: float, whole: float) -> str:
        size, name = next((unit for unit in units if whole >= unit[0]), units[-1])
        return f"{format_number(value / size)} {name}"

    return text


def _spanned(estimate: Estimate, text: Callable[[float, float], str]) -> str:
    """A figure and its interval in one unit: "119 days (112 to 130)"."""
    value = text(estimate.value, estimate.value)
    if estimate.low is None or estimate.high is None:
        return value
    low, high = (text(end, estimate.value).split()[0] for end in (estimate.low, estimate.high))
    return f"{value} ({low} to {high})"
