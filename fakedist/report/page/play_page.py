"""Draws of the load of experts as one page: memory and step as distributions, the load by layer; and played steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from fakedist.report.figures.look import STYLE_NAMES
from fakedist.report.page.bars import Bar, BarChart, Part
from fakedist.report.page.drawings import Pack
from fakedist.report.page.run_page import template_text
from fakedist.report.text.long_run_sheets import long_run_facts, long_run_tables, verdict_text
from fakedist.report.text.play_sheets import play_facts, play_tables, probability_text
from fakedist.results.long_runs import PlayedSteps
from fakedist.results.router_draws import Played
from fakedist.units import format_bytes

_BINS = 16
#: A layer with more experts shows ranks.
_MOST_COLUMNS = 64
#: A cell with so many times the mean has the full colour.
_FULL = 3.0
_ALLOCATED, _UNUSED = ("allocated", "k-activation"), ("reserved, not allocated", "rest")
_HOT, _MEDIAN = ("hottest rank", "k-gradient"), ("median rank", "k-optimizer_state")
_FITS, _LACKS = ("fits", "k-optimizer_state"), ("out of memory", "k-gradient")


def play_page(played: Played) -> str:
    """The page as text."""
    pack, draws = Pack(), played.draws
    pack.meta |= {"style": STYLE_NAMES, "figures": {}, "run": played.playable.run.path.name}
    fits = draws["fits"].to_list()
    charts = [
        (
            "Memory of the hottest rank, allocated",
            "simulated",
            _histogram(draws["peak_allocated_bytes"].to_list(), fits, format_bytes),
        )
    ]
    if draws["step_us"].notna().all():
        charts.append(
            ("Step", "estimated", _histogram(draws["step_us"].to_list(), fits, lambda us: f"{us / 1e3:,.1f} ms"))
        )
    context: dict[str, object] = {
        "probability": probability_text(played),
        "facts": play_facts(played),
        "sheets": play_tables(played),
        "charts": charts,
        "load": _load(played),
        "numbers": pack.text(),
    }
    return template_text("play.html.j2", "job", context)


def long_run_page(played: PlayedSteps) -> str:
    """The page of many played steps, as text."""
    pack = Pack()
    pack.meta |= {"style": STYLE_NAMES, "figures": {}, "run": played.playable.run.path.name}
    context: dict[str, object] = {
        "probability": verdict_text(played),
        "facts": long_run_facts(played),
        "sheets": long_run_tables(played),
        "charts": [("Memory of the steps", "simulated: the most of any seed in these steps", _steps(played))],
        "load": None,
        "numbers": pack.text(),
    }
    return template_text("play.html.j2", "job", context)


def _steps(played: PlayedSteps) -> BarChart:
    """A bar for each of equal ranges of steps: allocated, and what is reserved beyond that."""
    room, bars = played.playable.room_bytes, []
    edges = np.unique(np.linspace(0, played.num_steps, _BINS + 1).astype(int)).tolist()
    for low, high in pairwise(edges):
        rows = played.steps[played.steps["step"].between(low + 1, high)]
        if not len(rows):
            break
        allocated, reserved = (int(rows[f"peak_{name}_bytes"].max()) for name in ("allocated", "reserved"))
        sizes = zip((_ALLOCATED, _UNUSED), (allocated, max(reserved - allocated, 0)), strict=True)
        parts = [Part(*name, format_bytes(size), f"{100 * size / room:.2f}%") for name, size in sizes if size]
        bars.append(
            Bar(f"{low + 1:,} to {high:,}", parts, format_bytes(allocated), f"{format_bytes(reserved)} reserved")
        )
    return BarChart(bars, [_ALLOCATED, _UNUSED])


def _histogram(values: Sequence[float], fits: Sequence[bool], text: Callable[[int], str]) -> BarChart:
    """A bar for each of equal ranges: how many draws are in it, and how many of them have too little memory."""
    edges = np.histogram_bin_edges(values, _BINS)
    at = np.clip(np.searchsorted(edges, values, "right") - 1, 0, _BINS - 1)
    fit = np.bincount(at[np.array(fits)], minlength=_BINS)
    lack = np.bincount(at[~np.array(fits)], minlength=_BINS)
    most = int((fit + lack).max())
    bars = []
    for low, high, *numbers in zip(edges, edges[1:], fit.tolist(), lack.tolist(), strict=False):
        parts = [
            Part(name, style, f"{number:,} draws", f"{100 * number / most:.2f}%")
            for (name, style), number in zip((_FITS, _LACKS), numbers, strict=True)
            if number
        ]
        bars.append(
            Bar(f"{text(int(low))} to {text(int(high))}", parts, f"{sum(numbers):,}", f"{sum(numbers) / len(at):.1%}")
        )
    return BarChart(bars, [_FITS, _LACKS] if lack.any() else [_FITS])


def _bytes_at_peak(played: Played, seed: int, rank: int) -> list[int]:
    """Bytes of each layer with experts that follow their tokens, at a rank's peak."""
    playable = played.playable
    held: list[int] = playable.at_peak(next(playable.draws(played.load, [seed], rank=rank))).tolist()
    return held


def _layers(held: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> BarChart:
    """A bar for each layer of the hottest rank, and of the median rank below it."""
    most = max(max(map(max, held)), 1)
    bars = [
        Bar(
            f"layer {layer}" if number == 0 else "",
            [Part(name, style, format_bytes(held[number][layer]), f"{100 * held[number][layer] / most:.2f}%")],
            format_bytes(held[number][layer]),
            f"{tokens[number][layer]:,} tokens",
        )
        for layer in range(len(held[0]))
        for number, (name, style) in enumerate((_HOT, _MEDIAN))
    ]
    return BarChart(bars, [_HOT, _MEDIAN])


def _load(played: Played) -> dict[str, object]:
    """The load in the worst draw: tokens by layer and expert, and the layers of the hottest and the median rank."""
    worst, ranks = played.worst[0], next(group for group in played.playable.groups if played.worst[0].rank in group)
    tokens = played.playable.tokens(played.load, worst.seed, ranks)
    layers, experts = tokens.shape
    by_rank = tokens.reshape(layers, len(ranks), -1).sum(axis=2)
    shown, names, of = (tokens, range(experts), "expert") if experts <= _MOST_COLUMNS else (by_rank, ranks, "rank")
    each = shown.shape[1] // len(ranks)
    hot = ranks.index(worst.rank)
    median = int(np.argsort(by_rank.sum(axis=0), kind="stable")[len(ranks) // 2])
    times = shown / shown.mean(axis=1, keepdims=True)
    held = [_bytes_at_peak(played, worst.seed, ranks[at]) for at in (hot, median)]
    rows = [
        {
            "layer": layer,
            "cells": [(f"{value:.2f}", f"{min(value / _FULL, 1):.2f}") for value in times[layer].tolist()],
        }
        for layer in range(layers)
    ]
    return {
        "of": of,
        "rank": worst.rank,
        "median": ranks[median],
        "layers": _layers(held, [by_rank[:, at].tolist() for at in (hot, median)]),
        "columns": [(str(name), n // each == hot) for n, name in enumerate(names)],
        "rows": rows,
    }
