"""The model of NCCL's memory against what was published. To renew the model's figures and print the table:

python -m tests.unit.cost_model.nccl.test_published
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fakedist.cost_model.nccl import settings as nccl_settings
from fakedist.cost_model.nccl.communicators import Usage, communicator_memory, pipes
from fakedist.cost_model.nccl.settings import GroupShape, Nccl, Span, read_settings, total

DOCS = Path(__file__).parents[4] / "docs"
PUBLISHED = DOCS / "accuracy" / "nccl.json"
FIGURES: list[dict[str, Any]] = json.loads(PUBLISHED.read_text())["figures"]
MIB = 1 << 20


def model_bytes(figure: dict[str, Any]) -> list[int] | None:
    """The model's value of a figure; None where it was published without what the model needs."""
    if figure["fabric"] is None:
        return None
    settings = read_settings(Nccl(figure["environment"]))
    joined, shape = getattr(nccl_settings, figure["fabric"]), GroupShape(*figure["shape"])
    usage = Usage(frozenset(figure["operations"]))
    span = _part(figure["part"], communicator_memory(shape, usage, joined, settings), pipes(joined, settings))
    if figure["part"] == "net on the host":
        span = Span(*[settings.ll_bytes + settings.ll128_bytes + settings.simple_bytes + 2 * 4096] * 2)
    return [span.low, span.high]


def _part(part: str, found: Any, pipe: Any) -> Span:
    if part in ("send", "recv", "net on the host"):
        return getattr(pipe, part.split()[0])  # type: ignore[no-any-return]
    if part == "communicator":
        return found.bytes  # type: ignore[no-any-return]
    return total(found.parts[name] for name in part.split("+"))


def table() -> str:
    """The table of docs/accuracy/results.md."""
    rows = ["| what | published | model | difference |", "|---|---|---|---|"]
    for figure in FIGURES:
        what = f"{figure['what']} ({figure['source']})" + (f"; {figure['note']}" if figure["note"] else "")
        rows.append(f"| {what} | {_text(figure['published_bytes'])} | {_model(figure)} | {_difference(figure)} |")
    return "\n".join(rows)


def _model(figure: dict[str, Any]) -> str:
    if figure["model_bytes"] is None:
        return "none"
    low, high = figure["model_bytes"]
    return _text(low) if low == high else f"{_text(low)} to {_text(high)}"


def _text(size: int) -> str:
    return f"{size / MIB:,.0f} MiB" if size % MIB == 0 or size > 100 * MIB else f"{size:,} B"


def _difference(figure: dict[str, Any]) -> str:
    if figure["model_bytes"] is None:
        return "not compared"
    published, (low, high) = figure["published_bytes"], figure["model_bytes"]
    if low <= published <= high:
        return "0" if low == high else "within"
    nearest = low if published < low else high
    return f"{(nearest - published) / published:+.1%}"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["source"])
def test_the_models_figures_are_what_the_model_says(figure: dict[str, Any]) -> None:
    assert figure["model_bytes"] == model_bytes(figure)


def test_the_documentation_shows_every_figure() -> None:
    assert table() in (DOCS / "accuracy" / "results.md").read_text()


def test_what_is_exact_stays_exact() -> None:
    exact = [figure for figure in FIGURES if _difference(figure) == "0"]
    assert len(exact) == 7


if __name__ == "__main__":
    for each in FIGURES:
        each["model_bytes"] = model_bytes(each)
    PUBLISHED.write_text(json.dumps({**json.loads(PUBLISHED.read_text()), "figures": FIGURES}, indent=1) + "\n")
    print(table())
