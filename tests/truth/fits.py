"""Fit the two numbers of each host model on half of the published steps that the host limits; judge them on the others.

    python -m tests.truth.fits

The numbers are ``dispatch_us``, a forward of torch's Linear without CUDA's own calls, which scales the host clock by the
score of the machine that recorded a step, and ``launch_us``, a launch, which scales all of CUDA's calls. They minimise
the sum of the sizes of the logarithms of estimate over published step. Of the rows of a host in the order of their
names, the first, third and so on are fitted, the others judged. No step is shorter than its host's own time, so a
published step that kernels limit bounds both numbers from above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fakedist.cost_model.hosts import HOSTS, HostCosts, HostModel, HostSpec, default_host, scaled_calls
from fakedist.cost_model.timeline import Timeline
from tests.truth.catalogue import Row, catalogue, results
from tests.truth.steps import Recording, is_recorded

Floats = npt.NDArray[np.float64]
#: Steps are estimated for these and interpolated between them. A launch is published with 1.3 to 3.3 us; in steps on an
#: H200 it took 4.6 to 10 (docs/accuracy/results.md).
DISPATCH_US, LAUNCH_US = (3.0, 4.5, 6.0, 8.0, 11.0, 16.0), (2.0, 5.0, 10.0)
#: And these are tried.
_TRIED_DISPATCH_US, _TRIED_LAUNCH_US = np.arange(3.0, 16.0, 0.05), np.arange(2.0, 10.01, 0.1)


class HostNumbers(NamedTuple):
    """The two numbers of a host model."""

    dispatch_us: float
    launch_us: float


@dataclass(frozen=True)
class Bound:
    """The host's own time in a step that is longer: its parts, each per microsecond of a number of the host model."""

    row: Row
    dispatch: float
    launch: float

    def over(self, numbers: HostNumbers) -> float:
        """The host's time over the published step."""
        host_us = self.dispatch * numbers.dispatch_us + self.launch * numbers.launch_us
        return host_us / ((self.row.published_s or 0.0) * 1e6)


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows to fit and the rows to judge: every other one in the order of their names, from the first on."""
    ordered = sorted(rows, key=lambda row: row.name)
    return ordered[::2], ordered[1::2]


def rows_next_to(host: str, *, is_host_bound: bool) -> list[Row]:
    """The rows on GPUs whose usual host it is and whose host was measured, by their names."""
    return [
        row
        for row in sorted(catalogue().rows, key=lambda row: row.name)
        if row.published_s and row.is_host_bound is is_host_bound and default_host(row.gpu).name == host
        if is_recorded(row) and Recording(row).host.time.clock is not None
    ]


def with_numbers(host: HostModel, spec: HostSpec, numbers: HostNumbers) -> HostModel:
    """A host model with other numbers; CUDA's other calls change as a launch does."""
    calls = scaled_calls(spec.calls, numbers.launch_us / spec.calls.launch_us)
    dispatch = numbers.dispatch_us / (host.time.machine_us or 1.0)
    return replace(host, costs=replace(host.costs, dispatch=dispatch, calls=calls))


def errors(recording: Recording, spec: HostSpec) -> Floats:
    """Logarithms of estimate over published step, for all that is tried."""
    measured, fits = recording.host, (results().heat, results().fp8_heat)
    known = np.zeros((len(DISPATCH_US), len(LAUNCH_US)))
    for at, dispatch_us in enumerate(DISPATCH_US):
        for of, launch_us in enumerate(LAUNCH_US):
            recording.host = with_numbers(measured, spec, HostNumbers(dispatch_us, launch_us))
            known[at, of] = recording.estimate(*fits)[0]
    recording.host = measured
    by_launch = np.array([np.interp(_TRIED_LAUNCH_US, LAUNCH_US, each) for each in known])
    tried = np.array([np.interp(_TRIED_DISPATCH_US, DISPATCH_US, each) for each in by_launch.T]).T
    return np.log(tried / (recording.row.published_s or 0.0))


def bound_of(row: Row, spec: HostSpec) -> Bound:
    """The bound of a row: that of its rank whose host takes longest."""
    recording, parts = Recording(row), []
    for tables in recording.tables.values():
        timeline = Timeline(tables["launches"])
        nothing = np.zeros(int(timeline.has_work.sum()))
        costs = HostCosts(operation_us=0.0, dispatch=1.0 / (recording.host.time.machine_us or 1.0))
        dispatch = timeline.place(nothing, costs).end_us
        calls = timeline.place(nothing, replace(costs, calls=spec.calls)).end_us - dispatch
        parts.append(Bound(row, dispatch, calls / spec.calls.launch_us))
    return max(parts, key=lambda each: each.over(HostNumbers(spec.dispatch_us, spec.calls.launch_us)))


def fit(fitted: Sequence[Floats], bounds: Sequence[Bound]) -> HostNumbers:
    """The numbers with the least error over rows that no bound excludes."""
    total = np.sum([np.abs(each) for each in fitted], axis=0)
    for bound in bounds:
        host_us = bound.dispatch * _TRIED_DISPATCH_US[:, None] + bound.launch * _TRIED_LAUNCH_US[None, :]
        total = np.where(host_us <= (bound.row.published_s or 0.0) * 1e6, total, np.inf)
    dispatch, launch = np.unravel_index(int(np.argmin(total)), total.shape)
    return HostNumbers(round(float(_TRIED_DISPATCH_US[dispatch]), 2), round(float(_TRIED_LAUNCH_US[launch]), 1))


def main() -> None:
    """Print the numbers of each host, the bounds nearest to them and the errors of both halves."""
    for name, spec in HOSTS.items():
        rows = rows_next_to(name, is_host_bound=True)
        of_rows = {row.name: errors(Recording(row), spec) for row in rows}
        bounds = [bound_of(row, spec) for row in rows_next_to(name, is_host_bound=False)]
        fitted, judged = halves(rows)
        numbers = fit([of_rows[row.name] for row in fitted], bounds)
        print(f"{name}: dispatch {numbers.dispatch_us:g} us, launch {numbers.launch_us:g} us")
        at = (
            int(np.argmin(abs(_TRIED_DISPATCH_US - numbers.dispatch_us))),
            int(np.argmin(abs(_TRIED_LAUNCH_US - numbers.launch_us))),
        )
        for half, chosen in (("fitted", fitted), ("judged", judged)):
            off = [float(np.exp(of_rows[row.name][at])) - 1 for row in chosen]
            print(f"  {half}: median {median(map(abs, off)):.1%} of {len(off)}")
            print("".join(f"    {row.name}: {error:+.0%}\n" for row, error in zip(chosen, off, strict=True)), end="")
        for bound in sorted(bounds, key=lambda each: -each.over(numbers))[:3]:
            print(f"  bound {bound.row.name}: the host takes {bound.over(numbers):.2f} of the published step")


if __name__ == "__main__":
    main()
