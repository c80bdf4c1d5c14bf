"""What all charts share: colours, fonts, units, and text that is never taken for markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import plotly.graph_objects as go

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
    "forward": "#4573b9",
    "recompute": "#a877b5",
    "backward": "#eba63f",
    "optimizer": "#5fa052",
    "other": "#8b919c",
}
LINE_COLOUR = "#1f2933"
#: Longer names are cut in labels; the whole name is in the hover text.
_LONGEST_LABEL = 48


def shown(text: object) -> str:
    """Text as plotly shows it: plotly reads labels and hover text as a kind of HTML, so marks are escaped."""
    return escape(str(text), quote=False)


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


def stacked_rows(figure: go.Figure, num_rows: int) -> int:
    """Stack a figure's horizontal bars with the first row on top; return the height that the rows take, in pixels."""
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    return 140 + 22 * max(num_rows, 1)


def framed(figure: go.Figure, title: str, *, x: str = "", y: str = "", height: int = 420) -> go.Figure:
    """Give a figure the common look.

    Args:
        figure: The figure, changed in place.
        title: Its title.
        x: What the x axis shows, with its unit.
        y: What the y axis shows, with its unit.
        height: In pixels.
    """
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left"},
        template="plotly_white",
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
