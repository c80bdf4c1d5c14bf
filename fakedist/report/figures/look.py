"""The look of all charts: colours, fonts, units, and text that is never taken for markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import plotly.graph_objects as go

from fakedist.units import GIB, KIB, MIB, TIB
from fakedist.visible import visible_lines

#: The page's colours by category of memory.
CATEGORY_COLOURS = {
    "parameter": "#4573b9",
    "optimizer_state": "#57aba6",
    "gradient": "#d9534f",
    "workspace": "#94755f",
    "activation": "#eba63f",
    "communication": "#5fa052",
    "temporary": "#a877b5",
    "other": "#8b919c",
}
#: By family of kernels.
FAMILY_COLOURS = {
    "gemm": "#4573b9",
    "attention": "#a877b5",
    "norm": "#57aba6",
    "elementwise": "#eba63f",
    "copy": "#8b919c",
    "optimizer": "#5fa052",
    "communication": "#d9534f",
    "other": "#94755f",
}
#: By what a kernel's time is spent for.
KIND_COLOURS = {
    "generation": "#2a9d8f",
    "forward": "#4573b9",
    "recompute": "#a877b5",
    "backward": "#eba63f",
    "optimizer": "#5fa052",
    "other": "#8b919c",
}
#: Behind the curves: what the rank was doing.
PHASE_COLOURS = {
    "init": "#e3e6ec",
    "generation": "#d3ece8",
    "recompute": "#e3e6ec",
    "forward": "#d6e6fb",
    "backward": "#fbe5d6",
    "optimizer": "#dcefdc",
    "other": "#eceef2",
}
GROUP_COLOURS = ("#2f5fd0", "#b8671a", "#2f855a", "#9b3fa8", "#b3261e", "#0f7f8c")
INK, MUTED, LINE, SOFT, PANEL = "#171a21", "#5a6272", "#e2e5eb", "#eef0f4", "#ffffff"
ON_COLOUR, BAD = "#10131a", "#b3261e"
VEIL = "rgba(255, 255, 255, 0.38)"
#: In the allocator's segments: nothing, and what was freed but is still in use on another stream.
FREE, WAITING = "#e4e7ec", "#5c6470"
#: Communication while something computes, and the script's own ranges.
HIDDEN, RANGE = "#efb8b6", "#dcd8f2"
#: The two sides of a comparison.
SIDE_COLOURS = {"A": MUTED, "B": GROUP_COLOURS[0]}

#: Each colour's name in the page's style sheet, which gives it another value where the page is dark.
STYLE_NAMES = {
    **{colour: f"c-{name.replace('_', '-')}" for name, colour in CATEGORY_COLOURS.items()},
    **{colour: f"p-{name}" for name, colour in PHASE_COLOURS.items()},
    **{colour: f"g-{at}" for at, colour in enumerate(GROUP_COLOURS)},
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    SOFT: "soft",
    PANEL: "panel",
    ON_COLOUR: "on",
    VEIL: "veil",
    FREE: "free",
    WAITING: "waiting",
    HIDDEN: "hidden",
    RANGE: "range",
}
#: plotly's own templates are large, and copied into every figure.
_TEMPLATE = {
    "layout": {
        "paper_bgcolor": PANEL,
        "plot_bgcolor": PANEL,
        "xaxis": {"gridcolor": LINE, "zerolinecolor": LINE, "automargin": True},
        "yaxis": {"gridcolor": LINE, "zerolinecolor": LINE, "automargin": True},
    }
}
#: Longer names are cut in labels; the whole name is in the hover text.
_LONGEST_LABEL = 48
_LONGEST_TEXT = 200


def shown(text: object) -> str:
    """Text as plotly shows it: plotly reads labels and hover text as a kind of HTML, so marks are escaped.

    Control characters are written out.
    """
    whole = visible_lines(str(text))
    return escape(whole if len(whole) <= _LONGEST_TEXT else whole[: _LONGEST_TEXT - 1] + "…", quote=False)


def label(text: object) -> str:
    """A name as a label, cut at its front if it is long: the end of a layer's name says more."""
    whole = str(text)
    return shown(whole if len(whole) <= _LONGEST_LABEL else "…" + whole[1 - _LONGEST_LABEL :])


def spoken(name: str) -> str:
    """A category's name as people write it."""
    return name.replace("_", " ")


def layer_labels(names: Iterable[object]) -> list[str]:
    """Labels of layers. The row without a name is what is outside of any module."""
    return [label(name) if name else "outside of modules" for name in names]


def byte_unit(most: float) -> tuple[str, int]:
    """The unit of an axis of bytes, and its bytes: the largest that is not more than ``most``."""
    units = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next((unit for unit in units if most >= unit[1]), ("B", 1))


def new_figure(*traces: object) -> go.Figure:
    """A figure with the common template."""
    return go.Figure(data=traces, layout={"template": _TEMPLATE})


def load_plotly() -> None:
    """Import the parts of plotly that the figures are made of: it does so at their first use, for 0.15 s."""
    framed(new_figure(go.Bar(), go.Scatter(), go.Treemap()), "title", x="x", y="y")


def stacked_rows(figure: go.Figure, num_rows: int) -> int:
    """Stack a figure's horizontal bars with the first row on top; return the height that the rows take, in pixels."""
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    return 140 + 22 * max(num_rows, 1)


def framed(figure: go.Figure, title: str, *, x: str = "", y: str = "", height: int = 420) -> go.Figure:
    """Give a figure the common look. ``height`` is in pixels."""
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left"},
        height=height,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"traceorder": "normal"},
        hoverlabel={"align": "left", "namelength": -1},
    )
    if x:
        figure.update_xaxes(title_text=x)
    if y:
        figure.update_yaxes(title_text=y)
    return figure
