"""The fits of host models and widths: which rows judge, what minimises the errors, and how bounds count."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fakedist.cost_model import accuracy
from fakedist.cost_model.accuracy import KERNELS_WIDER
from fakedist.cost_model.hosts import HOSTS
from tests.accuracy.results import DATA
from tests.truth import fits
from tests.truth.catalogue import catalogue, halves, results
from tests.truth.fits import Bound, HostNumbers, Parts
from tests.truth.page import held_steps
from tests.truth.steps import Recording

NOTHING = np.zeros(2)


def test_every_other_row_judges_in_the_order_of_their_names() -> None:
    rows = [replace(catalogue().row("gpt-tiny"), name=name) for name in "cadbe"]
    fitted, judged = halves(rows)
    assert [row.name for row in fitted] == ["a", "c", "e"]
    assert [row.name for row in judged] == ["b", "d"]


def test_each_group_is_split_and_rows_of_the_power_models_fit_are_in_none() -> None:
    groups = catalogue().step_groups()
    assert {name: len(rows) for name, rows in groups.items()} == {"kernels": 56, "dgx-h100": 15, "grace": 13}
    judged = catalogue().judged_steps
    later = {row.name for row in catalogue().rows if row.is_later}
    assert len(judged) == 28 + 7 + 6 + len(later)
    assert "zero3-masters-bf16" in later <= judged
    assert {"gpt-tiny-unfused", "qwen3-30b-gb200", "compiled-64-tp8"} <= judged
    assert not {"gpt-tiny", "qwen3-30b-gb300", "eager-8"} & judged


def test_only_judged_steps_count_as_held() -> None:
    found = results()
    judged = [row for row in catalogue().rows if row.name in catalogue().judged_steps]
    assert len(held_steps(found, is_host_bound=False)) == 28
    before = sum(held_steps(found, is_host_bound=True))
    assert next(row.name for row in judged if row.is_host_bound) == "gpt-tiny-gb200"
    for name in ("gpt-tiny", "gpt-tiny-gb200"):
        found.steps[name] = replace(found.steps[name], low_s=0.0, high_s=1e-3)
    assert sum(held_steps(found, is_host_bound=True)) == before - 1


def _steps_of(dispatch: float, launch: float, published_us: float) -> fits.Floats:
    """Errors of a step that is its host's time alone."""
    host_us = dispatch * fits._TRIED[0] + launch * fits._TRIED[1]
    return np.asarray(np.log(host_us / published_us))


def test_the_numbers_that_made_the_steps_are_found() -> None:
    made = HostNumbers(7.5, 4.0)
    parts = [(10.0, 1.0), (10.0, 8.0), (3.0, 5.0)]
    steps = [_steps_of(*each, each[0] * made.dispatch_us + each[1] * made.launch_us) for each in parts]
    assert fits.fit(steps, []) == pytest.approx(made)


def test_a_bound_counts_only_where_the_host_alone_takes_longer() -> None:
    steps = [_steps_of(10.0, 1.0, 80.0), _steps_of(10.0, 8.0, 110.0), _steps_of(3.0, 5.0, 42.5)]
    free = fits.fit(steps, [])
    loose = Bound("loose", 100.0, 10.0, 1.0, 0.0)
    assert loose.over(*free) < 1
    assert fits.fit(steps, [loose]) == free
    held = fits.fit(steps, [replace(loose, name=name, published_us=40.0) for name in "abcdefgh"])
    assert loose.over(*held) < loose.over(*free)


def test_the_hosts_time_in_a_recorded_step_is_its_clock_and_its_calls() -> None:
    spec, row = HOSTS["dgx-h100"], catalogue().row("compiled-8")
    bound = fits.bound_of(row, spec)
    (tables,) = Recording(row).tables.values()
    clock_us = tables["launches"]["dispatch_us"].sum()
    machine_us = Recording(row).host.time.machine_us or 0.0
    assert bound.dispatch * machine_us == pytest.approx(clock_us, rel=1e-3)
    assert 0 < bound.launch < len(tables["launches"]) * spec.calls.collective_us / spec.calls.launch_us
    assert bound.over(spec.dispatch_us, spec.calls.launch_us) < 0.2


def test_the_parts_of_an_interval_make_the_interval_of_today() -> None:
    found, row = results(), catalogue().row("gpt-7b-tp4")
    low_s, high_s = Recording(row).estimate(found.heat, found.fp8_heat)[1:]
    parts = fits.parts_of(Recording(row))
    off = [math.hypot(KERNELS_WIDER * parts.kernels_s[at], parts.calls_s[at], parts.host_s[at]) for at in (0, 1)]
    assert (parts.step_s - off[0], parts.step_s + off[1]) == pytest.approx((low_s, high_s))


def test_kernels_wider_widens_the_interval_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    row = catalogue().row("compiled-8")
    of_errors = fits.parts_of(Recording(row)).kernels_s
    monkeypatch.setattr(accuracy, "KERNELS_WIDER", 2 * KERNELS_WIDER)
    assert fits.parts_of(Recording(row)).kernels_s == pytest.approx(2 * of_errors, rel=0.05)


def test_a_step_is_inside_up_to_the_parts_of_its_interval_together() -> None:
    parts = Parts(1.0, 0.8, np.array([-0.1, 0.12]), NOTHING, NOTHING)
    assert not parts.is_inside(1.0, NOTHING)
    assert parts.is_inside(1.0, np.array([0.0, 0.16 + 1e-9]))
    assert parts.is_inside(1.7, NOTHING)
    assert not replace_published(parts, 0.6).is_inside(1.7, NOTHING)


def replace_published(parts: Parts, published_s: float) -> Parts:
    return parts._replace(published_s=published_s)


def test_the_least_factor_holds_nine_of_ten() -> None:
    assert fits.least_factor([(1.0, 8), (1.1, 9), (1.2, 10)], 10) == 1.1


def test_the_model_has_the_widths_that_were_fitted() -> None:
    widths = {row["kind"]: row["factor"] for row in json.loads((DATA / "interval-widths.json").read_text())["rows"]}
    assert set(widths) == {"kernels", "host"}
    assert widths["kernels"] == KERNELS_WIDER
    assert {host.most for host in HOSTS.values()} == {widths["host"]}
