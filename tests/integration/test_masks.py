"""flex_attention is priced by the blocks of its mask, however the mask was made; one that is made up is bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "masks.py"
#: The order in which the job attends. Backward runs in the other order.
ORDER = ("causal", "window", "prefix", "documents", "compiled", "made up", "by hand")
BLOCK, TOKENS, HEADS, WIDTH = 128, 4096, 2, 64


@pytest.mark.long
def test_flex_attention_costs_the_blocks_of_its_mask(profile_once: ProfileOnce) -> None:
    ran = profile_once(JOB, options=("--until", "end", "--full"))
    finished = ran.finished
    assert finished.code == 0, finished.stderr
    line = next(line for line in finished.stdout.splitlines() if line.startswith("MASKS "))
    found, expected = json.loads(line.removeprefix("MASKS "))
    assert found == expected
    assert set(found) == set(ORDER) - {"made up"}

    kernels = ran.table("kernels").sort_values("start_us")
    kernels = kernels[kernels["name"].astype(str).str.startswith("triton_tem_")]
    for phase, products, order in (("forward", 2, ORDER), ("backward", 5, ORDER[::-1])):
        own = kernels[kernels["phase"].astype(str) == phase].set_index(pd.Index(order))
        flops = 2.0 * HEADS * TOKENS * WIDTH * products
        met = {
            name: BLOCK * (sum(partial) + sum(full)) / (TOKENS / BLOCK) for name, (partial, full) in expected.items()
        }
        for name in ORDER:
            assert own["flops"][name] == pytest.approx(flops * met.get(name, TOKENS), rel=0.03), (phase, name)
        dense, causal, window = own.loc["made up"], own.loc["causal"], own.loc["window"]
        assert causal["duration_us"] < 0.7 * dense["duration_us"]
        assert window["duration_us"] < 0.3 * dense["duration_us"]
        # Nothing is known of a mask that is made up: it may be anything between one block of keys and all.
        assert dense["low_us"] < min(window["duration_us"], 0.2 * dense["duration_us"])
        assert dense["high_us"] > dense["duration_us"]
    note = "2 launches of flex_attention are estimated as if every query met every key"
    assert note in " ".join(finished.stdout.split())
