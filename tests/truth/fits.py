"""Fit the host models, and the widths of intervals, on half of the published steps, and judge them on the other half.

    python -m tests.truth.fits hosts     # the two numbers of each host model
    python -m tests.truth.fits widths    # then the widths, by the host models as they are

Of some rows in the order of their names, the first, third and so on are fitted, the others judged. Written are
docs/accuracy/host-fits.json and interval-widths.json; ``python -m tests.accuracy.results`` makes the tables of them,
and tests hold the model to them.

The numbers of a host are ``dispatch_us``, a forward of torch's Linear without CUDA's own calls, which scales the host
clock by the score of the machine that recorded a step, and ``launch_us``, a launch in a step, which scales all of
CUDA's calls. They minimise the sum of the sizes of the logarithms of estimate over published step. No step is shorter
than its host's own time: a step that kernels limit, published for a GPU next to that host, counts like another row by
as much as it is.

A width is the least factor with which 90 % of the fitted half are inside of their intervals: of what the errors of a
step's kernels say, and of the host's time in both directions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from fakedist.cost_model import step
from fakedist.cost_model.accuracy import KERNELS_WIDER
from fakedist.cost_model.hosts import HOSTS, CallCosts, HostCosts, HostModel, HostSpec, default_host, widened
from fakedist.cost_model.job import job_times
from fakedist.cost_model.timeline import Timeline
from tests.accuracy.results import write_result
from tests.truth.catalogue import Row, catalogue, halves, results
from tests.truth.steps import Recording, is_recorded

Floats = npt.NDArray[np.float64]
#: Steps are estimated for these and interpolated between them. A launch is published with 1.3 to 3.3 us; in steps on an
#: H200 it took 4.6 to 10 (docs/accuracy/results.md).
DISPATCH_US, LAUNCH_US = (3.0, 4.5, 6.0, 8.0, 11.0, 16.0), (2.0, 5.0, 10.0)
#: And these are tried.
_TRIED_DISPATCH_US, _TRIED_LAUNCH_US = np.arange(3.0, 16.0, 0.05), np.arange(2.0, 10.01, 0.1)
#: Factors of the host's time for which intervals are computed, and interpolated between.
_HOST_WIDTHS = (1.15, 1.4, 1.8)
#: What the host's width was before it was fitted, a prior.
_PRIOR = 1.5
#: The GPUs that a host model is of: the steps of others, which have it for want of one, bound nothing.
_GPUS = {"dgx-h100": "h100", "grace": "gb"}
#: Of the fitted half, inside of the intervals.
_INSIDE = 0.9


class HostNumbers(NamedTuple):
    """The two numbers of a host model."""

    dispatch_us: float
    launch_us: float


#: Tried.
_Grid = tuple[Floats, Floats]
_TRIED: _Grid = (_TRIED_DISPATCH_US[:, None], _TRIED_LAUNCH_US[None, :])


@dataclass(frozen=True)
class Bound:
    """A published step and the host's own time in it: per microsecond of each number of a host model, and the rest."""

    name: str
    published_us: float
    dispatch: float
    launch: float
    collectives_us: float

    def over(self, dispatch_us: float | Floats, launch_us: float | Floats) -> float | Floats:
        """The host's time over the published step."""
        return (self.dispatch * dispatch_us + self.launch * launch_us + self.collectives_us) / self.published_us


#: Mixtral 8x7B on 64 H100 (NVIDIA/Megatron-LM @d98e8a64, 3.306 s), of which no launches are kept: rank 48, of the last
#: stage, of examples/megatron_gpt.py --preset mixtral-8x7b --tensor-model-parallel-size 2 --max-microbatches 0.
_MIXTRAL = Bound("mixtral-8x7b", 3.306e6, 291_994, 53_664, 123_020)


def with_numbers(host: HostModel, spec: HostSpec, numbers: HostNumbers) -> HostModel:
    """A host model with other numbers; CUDA's other calls change as a launch does."""
    calls = replace(spec, calls_scale=numbers.launch_us / spec.calls.launch_us).calls_in_step
    dispatch = numbers.dispatch_us / (host.time.machine_us or 1.0)
    return replace(host, costs=replace(host.costs, dispatch=dispatch, calls=calls))


def errors(row: Row, spec: HostSpec) -> Floats:
    """Logarithms of estimate over published step, for all that is tried."""
    recording, known = Recording(row), np.zeros((len(DISPATCH_US), len(LAUNCH_US)))
    measured, fits = recording.host, (results().heat, results().fp8_heat)
    for at, dispatch_us in enumerate(DISPATCH_US):
        for of, launch_us in enumerate(LAUNCH_US):
            recording.host = with_numbers(measured, spec, HostNumbers(dispatch_us, launch_us))
            known[at, of] = recording.estimate(*fits)[0]
    by_launch = np.array([np.interp(_TRIED_LAUNCH_US, LAUNCH_US, each) for each in known])
    tried = np.array([np.interp(_TRIED_DISPATCH_US, DISPATCH_US, each) for each in by_launch.T]).T
    return np.log(tried / (row.published_s or 0.0))


def bound_of(row: Row, spec: HostSpec) -> Bound:
    """The bound of a row: that of its rank whose host takes longest."""
    recording, parts = Recording(row), []
    for tables in recording.tables.values():
        timeline = Timeline(tables["launches"])
        nothing = np.zeros(len(timeline.what))
        costs = HostCosts(operation_us=0.0, dispatch=1.0 / (recording.host.time.machine_us or 1.0))
        dispatch = timeline.place(nothing, costs).end_us
        collectives = CallCosts(collective_us=spec.calls.collective_us)
        collectives_us = timeline.place(nothing, replace(costs, calls=collectives)).end_us - dispatch
        launch = (
            timeline.place(nothing, replace(costs, calls=spec.calls)).end_us - dispatch - collectives_us
        ) / spec.calls.launch_us
        parts.append(Bound(row.name, (row.published_s or 0.0) * 1e6, dispatch, launch, collectives_us))
    return max(parts, key=lambda each: each.over(spec.dispatch_us, spec.calls.launch_us))


def fit(fitted: Sequence[Floats], bounds: Sequence[Bound]) -> HostNumbers:
    """The numbers with the least error over rows and bounds."""
    sizes = [np.abs(each) for each in fitted]
    sizes += [np.maximum(np.log(bound.over(*_TRIED)), 0.0) for bound in bounds]
    total = np.sum(sizes, axis=0)
    dispatch, launch = np.unravel_index(int(np.argmin(total)), total.shape)
    return HostNumbers(round(float(_TRIED_DISPATCH_US[dispatch]), 2), round(float(_TRIED_LAUNCH_US[launch]), 1))


def _steps_of_kernels(gpu: str) -> list[Row]:
    """The rows of some GPUs that kernels limit, with a host clock, whether the power model is fitted on them or not."""
    chosen = [row for row in catalogue().rows if row.gpu.startswith(gpu) and row.published_s and not row.is_host_bound]
    return [row for row in chosen if is_recorded(row) and Recording(row).host.time.clock is not None]


def fit_host(name: str) -> Iterator[dict[str, object]]:
    """The lines of a host: both halves, with the numbers, the errors and the bounds that are not kept."""
    spec, rows, others = HOSTS[name], catalogue().step_groups()[name], _steps_of_kernels(_GPUS[name])
    of_rows = {row.name: errors(row, spec) for row in rows}
    bounds = [bound_of(row, spec) for row in others]
    bounds += [_MIXTRAL] if name == "dgx-h100" else []
    numbers = fit([of_rows[row.name] for row in halves(rows)[0]], bounds)
    at = tuple(int(np.argmin(abs(np.ravel(tried) - own))) for tried, own in zip(_TRIED, numbers, strict=True))
    broken = {bound.name: round(float(bound.over(*numbers)), 3) for bound in bounds if bound.over(*numbers) > 1}
    for half, chosen in zip(("fitted", "judged"), halves(rows), strict=True):
        off = {row.name: round(math.expm1(float(of_rows[row.name][at])), 4) for row in chosen}
        yield {
            "host": name, "half": half, **numbers._asdict(), "errors": off, "num_bounds": len(bounds), "broken": broken
        }  # fmt: skip


class Parts(NamedTuple):
    """An estimate in seconds, and by how much each part of its interval alone is off it: on both sides, [low, high]."""

    published_s: float
    step_s: float
    kernels_s: Floats
    calls_s: Floats
    host_s: Floats

    def is_inside(self, kernels: float, host_s: Floats) -> bool:
        """Whether the published step is inside, with other widths."""
        low, high = np.sqrt(np.square(kernels * self.kernels_s) + np.square(self.calls_s) + np.square(host_s))
        return bool(self.step_s - low <= self.published_s <= self.step_s + high)


def parts_of(recording: Recording) -> Parts:
    """The parts of a row's interval, without today's factor of the kernels'."""
    combined = mock.Mock(wraps=step.interval_of)
    with mock.patch.object(step, "interval_of", combined), mock.patch.object(job_times, "interval_of", combined):
        step_s = recording.estimate(results().heat, results().fp8_heat)[0]
    end_us, sides = combined.call_args.args
    ends = np.array([[side[0], side[1] if len(side) > 2 else end_us, side[-1]] for side in sides])
    kernels_s, calls_s, host_s = ((ends - end_us) / end_us * step_s).T
    return Parts(recording.row.published_s or 0.0, step_s, kernels_s / KERNELS_WIDER, calls_s, host_s)


def host_parts(row: Row) -> tuple[Parts, Floats]:
    """The parts of a row's interval, and those of the host for ``_HOST_WIDTHS``: a line for each side."""
    recording, found = Recording(row), []
    host, spec = recording.host, default_host(recording.gpu.like or recording.gpu.name)
    assert host.time.clock is not None
    for width in _HOST_WIDTHS:
        wide = widened(replace(spec, least=1 / width, most=width), host.time.clock)
        recording.host = replace(host, costs=replace(host.costs, range=wide))
        found.append(parts_of(recording))
    return found[0], np.array([parts.host_s for parts in found]).T


def least_factor(inside: Sequence[tuple[float, int]], number: int) -> float:
    """The least factor with which enough of some rows are inside, of factors and how many are."""
    return next(factor for factor, held in inside if held >= _INSIDE * number)


def fit_widths() -> Iterator[dict[str, object]]:
    """A line for each width: the factor, and how many of each half are inside with it."""
    groups = catalogue().step_groups()
    fitted, judged = halves(groups["kernels"])
    parts = {row.name: parts_of(Recording(row)) for row in (*fitted, *judged)}

    def held(half: Sequence[Row], factor: float) -> int:
        return sum(parts[row.name].is_inside(factor, parts[row.name].host_s) for row in half)

    factors = np.round(np.arange(0.5, 4.0, 0.05), 2).tolist()
    kernels = least_factor([(factor, held(fitted, factor)) for factor in factors], len(fitted))
    yield _width("kernels", kernels, [(held(half, kernels), held(half, 1.0), len(half)) for half in (fitted, judged)])
    fitted, judged = ([*one, *other] for one, other in zip(*(halves(groups[name]) for name in HOSTS), strict=True))
    known = {row.name: host_parts(row) for row in (*fitted, *judged)}

    def hosts_held(half: Sequence[Row], width: float) -> int:
        number = 0
        for row in half:
            own, by_width = known[row.name]
            host_s = np.array([np.interp(width, _HOST_WIDTHS, side) for side in by_width])
            number += own.is_inside(kernels, host_s)
        return number

    widths = np.round(np.arange(1.15, 1.8, 0.01), 2).tolist()
    width = least_factor([(width, hosts_held(fitted, width)) for width in widths], len(fitted))
    of_halves = [(hosts_held(half, width), hosts_held(half, _PRIOR), len(half)) for half in (fitted, judged)]
    yield _width("host", width, of_halves)


def _width(kind: str, factor: float, sides: Sequence[tuple[int, int, int]]) -> dict[str, object]:
    names = ("inside", "inside_before", "rows")
    of_halves = {
        f"{half}_{name}": number
        for half, side in zip(("fitted", "judged"), sides, strict=True)
        for name, number in zip(names, side, strict=True)
    }
    return {"kind": kind, "factor": factor, **of_halves}


def main() -> None:
    """Fit what is named, write it and print it."""
    chosen = sys.argv[1:]
    if chosen == ["hosts"]:
        lines = [line for name in HOSTS for line in fit_host(name)]
        write_result("host-fits", lines)
    elif chosen == ["widths"]:
        lines = list(fit_widths())
        write_result("interval-widths", lines)
    else:
        sys.exit(__doc__)
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
