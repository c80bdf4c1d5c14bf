"""The search for changes that fit, and how they become the script's own flags."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fakedist.analysis.advice import RULES, are_compatible
from fakedist.analysis.evidence import Change, Evidence, Price, Saving
from fakedist.extras.plan import fitting
from fakedist.extras.plan.fitting import Fitted, RecordedPlan, fit
from fakedist.extras.plan.plan_reports import best_of, fit_report
from fakedist.report.content.report_blocks import Remark, Verdict
from fakedist.results.opening import open_run
from fakedist.results.run import evidence_of
from tests.unit.analysis.recorded import MIB, HandMade
from tests.unit.analysis.test_advice import blocks, trained
from tests.unit.report.handmade import built

SIZE = 1_000 * MIB


@pytest.fixture
def run_path(made: HandMade, tmp_path: Path) -> Path:
    trained(made, blocks(made, 4))  # a checkpoint leaves 62 of 122 MiB, and 964 of 1,024 reserved
    made.ended()
    return built(made, tmp_path / "run", arguments=("--checkpoint", "none", "--lr", "0.1"))


def found(path: Path, size: int = SIZE, **flags: str) -> Fitted:
    run = open_run(path)
    run.summary = replace(run.summary, estimated_outside=None)
    return fit(run, size, flags)


def priced(evidence: Evidence) -> Iterator[Change]:
    """The rules' changes: checkpoints of fewer layers take less time, and one that gives nothing is free."""
    yield Change("nothing", "nothing", "", Saving(np.zeros(len(evidence.blocks))), price=Price(0.0, 0.0, ""))
    for rule in RULES:
        for number, change in enumerate(rule(evidence)):
            yield replace(change, price=Price(90.0 - 20 * number, 110.0 - 20 * number, "recomputation"))


def test_the_first_plan_is_the_cheapest_of_all_combinations_and_has_no_idle_change(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "RULES", (priced,))
    for size in (970, 990, 1010):
        fitted = found(run_path, size * MIB)
        evidence = evidence_of(fitted.run)
        assert evidence is not None
        changes = [*priced(evidence)]
        enough = [
            sum(change.price.high_us for change in some if change.price)
            for number in range(1, 5)
            for some in combinations(changes, number)
            if are_compatible(some) and evidence.needed_without(*evidence.saved(some))[1] <= size * MIB
        ]
        sure = [plan for plan in fitted.plans if plan.need.fits == "fits"]
        assert sure[0].high_us == min(enough)
        assert all("nothing" not in plan.titles for plan in fitted.plans)


def test_flags_replace_those_of_the_same_name_and_the_gpu_has_the_size(run_path: Path) -> None:
    plans = found(run_path, checkpoint="--checkpoint full").plans
    plan = next(plan for plan in plans if plan.titles == ["checkpoint layers.0-3 (Block)"])
    assert plan.job is not None
    assert plan.job.arguments == ("--lr", "0.1", "--checkpoint", "full")
    assert plan.job.gpu_memory_bytes == SIZE


def test_a_change_without_flags_is_named_and_has_no_job(run_path: Path) -> None:
    plan = next(plan for plan in found(run_path).plans if plan.titles[0].startswith("checkpoint layers"))
    assert (plan.job, plan.unmapped) == (None, ("checkpoint",))


def test_a_run_that_fits_needs_nothing_and_one_that_cannot_names_the_nearest(run_path: Path) -> None:
    assert found(run_path, 1 << 34).plans == ()
    fitted = found(run_path, 3 * MIB)
    assert fitted.plans == ()
    assert fitted.nearest is not None
    assert fitted.nearest.need.low_bytes > 3 * MIB


def test_what_was_recorded_counts_more_than_what_was_replayed(run_path: Path) -> None:
    fitted = found(run_path, checkpoint="--checkpoint full")
    number = next(at for at, plan in enumerate(fitted.plans) if plan.titles == ["checkpoint layers.0-3 (Block)"])
    plan = replace(fitted.plans[number], recorded=RecordedPlan(fitted.run))  # as if its flags had done nothing
    fitted = replace(fitted, plans=(*fitted.plans[:number], plan, *fitted.plans[number + 1 :]))
    fitted.run.summary = replace(fitted.run.summary, fits=False)
    assert best_of(fitted) is not plan
    said = [block.text for block in fit_report(fitted).blocks if isinstance(block, Remark | Verdict)]
    assert any("does not allocate what was replayed" in text for text in said)
