"""Copies of a model that never run have layers of their own, named after what the script calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import ProfileOnce

JOB = Path(__file__).parent / "jobs" / "copies.py"
MODEL_BYTES = 2 * (2 * 512 * 1024 + 1024 + 512) * 4


@pytest.mark.long
def test_copies_that_never_run_are_found_and_named(profile_once: ProfileOnce) -> None:
    ran = profile_once(JOB)
    summary, layers = ran.summary, ran.table("layers").set_index("name")
    assert sum(summary["by_category"].values()) == summary["peak_allocated_bytes"]
    assert layers["peak_own_bytes"].sum() == summary["peak_allocated_bytes"]
    copies = layers[layers.index.str.startswith("copy of the parameters") & (layers["peak_own_bytes"] > 0)]
    assert set(copies.index) == {
        f"copy of the parameters ({name})" for name in ("ema", "averaged", "shadow_of_unet", "best")
    }
    assert (copies["peak_other_bytes"] == copies["peak_own_bytes"]).all()
    assert dict(copies["peak_own_bytes"]) == dict.fromkeys(copies.index, MODEL_BYTES)
    # The momentum has parameters' shapes and was made as zeros: it is not a copy.
    assert MODEL_BYTES <= layers.loc["", "peak_other_bytes"] < MODEL_BYTES + (1 << 20)
    parameters = layers["peak_parameter_bytes"].sum()
    assert parameters == MODEL_BYTES
