"""A simulated rollout as text, Markdown and an object."""

from __future__ import annotations

from rich.console import Console

from fakedist.cost_model.rollout.rollout_time import RolloutTime
from fakedist.report.text.sheet import escaped, print_figures, print_heading, print_remark
from fakedist.rundir.plain import to_plain
from fakedist.units import format_us

_TITLE = "Rollout of one engine, simulated and estimated"
_REMARKS = (
    "continuous batching as in vLLM 0.33.0, with CUDA graphs and asynchronous scheduling; no prompts share a prefix",
    "the host takes as long for a step as vLLM did on one machine; --host scales it",
)


def rollout_figures(rollout: RolloutTime) -> list[tuple[str, str, str]]:
    """Name, figure and details of each line about a rollout."""
    whole = rollout.time_us or 1.0
    parts = sorted(rollout.parts, key=lambda part: -part.time_us)
    interval = f"90 % interval: {format_us(rollout.low_us)} to {format_us(rollout.high_us)}"
    asked = f"{rollout.num_requests:,} requests, {rollout.prompt_tokens:,} tokens a prompt"
    given_back = f"{rollout.num_given_back:,.0f} times a request gave its slots of the KV cache back"
    figures = [
        ("rollout", format_us(rollout.time_us), interval),
        ("generated", f"{rollout.generated_tokens:,.0f} tokens", asked),
        ("tokens/s", f"{rollout.tokens_per_s:,.0f}", f"{rollout.ranks} GPU{'s' * (rollout.ranks > 1)} of the engine"),
        ("steps", f"{rollout.num_steps:,.0f}", given_back if rollout.num_given_back >= 1 else ""),
        (
            "decoding at once",
            f"{rollout.mean_decoding:,.1f} requests",
            f"mean of the steps; at most {rollout.most_decoding:,}",
        ),
        (
            "tail",
            f"{rollout.tail_us / whole:.0%}",
            "of the time: none waits, and at most a quarter of the most requests decode",
        ),
    ]
    return [*figures, *((part.name, f"{part.time_us / whole:.1%}", format_us(part.time_us)) for part in parts)]


def render_rollout(rollout: RolloutTime, console: Console) -> None:
    """Print a rollout."""
    print_heading(console, _TITLE)
    print_figures(console, rollout_figures(rollout), is_right=True)
    for text in _REMARKS:
        print_remark(console, text)


def rollout_markdown(rollout: RolloutTime) -> str:
    """The same as Markdown."""
    lines = [f"**{_TITLE}**", ""]
    lines += [
        f"- {name}: **{figure}**{', ' if more else ''}{escaped(more)}"
        for name, figure, more in rollout_figures(rollout)
    ]
    return "\n".join([*lines, *(f"- {text}" for text in _REMARKS)]) + "\n"


def rollout_object(rollout: RolloutTime) -> dict[str, object]:
    """The object of ``--json``: the attributes of :class:`RolloutTime`, and ``tokens_per_s``."""
    plain = to_plain(rollout)
    assert isinstance(plain, dict)
    return {**plain, "tokens_per_s": rollout.tokens_per_s}
