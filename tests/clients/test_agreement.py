"""A run agrees with the arithmetic of its entry, or the check says which figure does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from tests.clients.agreement import Phases, disagreement, found_by
from tests.clients.catalogue import Arithmetic
from tests.clients.catalogue.arithmetic import Transformer

_KINDS = {"forward": 2.0, "backward": 4.0, "optimizer": 1.0, "other": 0.0}
STEPS = [{"step": 1}, {"step": 2}]
SUMMARY: dict[str, Any] = {"steps": STEPS, "time": {"flops": 600.0, "by_kind": _KINDS}, "peak_allocated_bytes": 130}
#: Two steps of four events each, after two of the beginning.
SPANS = pd.DataFrame(
    [(0, "init", 0), (1, "forward", 2), (1, "backward", 4), (2, "forward", 6), (2, "backward", 8)],
    columns=["step", "phase", "first_event"],
)
BLOCKS = pd.DataFrame(
    [
        ("parameter", 40, 0, 99),  # alive throughout
        ("gradient", 30, 4, 5),  # of the first step alone
        ("gradient", 20, 7, 8),
        ("gradient", 15, 8, 9),  # takes the place of the one before
        ("optimizer_state", 80, 5, 99),
    ],
    columns=["category", "requested_bytes", "alloc_event", "free_event"],
)
AGREES = Arithmetic(40, 20, 80, flops=600, peak=130)


def wrong(arithmetic: Arithmetic, spans: pd.DataFrame = SPANS, summary: dict[str, Any] = SUMMARY) -> str:
    found = found_by({"blocks": BLOCKS, "spans": spans}, summary)
    return disagreement(arithmetic, found, Phases.of(spans, summary))


def test_most_of_a_category_in_the_last_step_is_what_counts() -> None:
    assert wrong(AGREES) == ""


def test_what_is_freed_behind_the_last_step_was_held_in_it() -> None:
    torn_down = pd.concat([SPANS, pd.DataFrame([(3, "other", 99)], columns=SPANS.columns)])
    assert wrong(AGREES, torn_down) == ""


def test_the_figure_that_disagrees_is_named_with_what_was_wanted() -> None:
    assert wrong(replace(AGREES, gradients=30)) == "gradients: 20, by arithmetic 30 (within 0.1%)"
    assert wrong(replace(AGREES, flops=620)) == "flops: 600, by arithmetic 620 (within 1.0%)"
    assert wrong(replace(AGREES, flops=620, flops_within=0.05)) == ""


def test_what_arithmetic_does_not_give_is_not_looked_at() -> None:
    assert wrong(Arithmetic()) == ""
    assert Arithmetic(parameters=1, flops=2).named == ("parameters", "flops")


def test_a_phase_without_kernels_in_the_timed_step_is_told() -> None:
    idle = {"steps": STEPS, "time": {"flops": 600.0, "by_kind": _KINDS | {"forward": 0.0}}, "peak_allocated_bytes": 130}
    assert wrong(AGREES, summary=idle) == "no kernel of the timed step ran in forward"


def test_a_step_that_begins_with_its_backward_is_told() -> None:
    swapped = SPANS.assign(phase=["init", "forward", "backward", "backward", "forward"])
    assert wrong(AGREES, swapped) == "step 2 has its phases in the order backward, forward"


def test_a_transformer_has_the_parameters_of_llama_3_8b() -> None:
    # Meta's model card: 8.03 billion, and 6.98 billion in its 32 layers.
    llama = Transformer(32, 4096, 14_336, 128_256, keys=1024)
    assert llama.parameters == 8_030_261_248
    assert llama.flops(1, 8192) / 8192 == 6 * llama.matrices + 7 * 8193 * 4096 * 32
