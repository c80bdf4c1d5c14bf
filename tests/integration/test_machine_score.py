"""The score of the machine that records: it changes nothing that is recorded, and a busy process does not change it."""

from __future__ import annotations

import pytest

from tests.support.virtual import on_virtual_gpu

pytestmark = pytest.mark.integration


def test_the_score_draws_no_number_and_leaves_memory_as_it_was() -> None:
    """With known values in the default segment, where the virtual GPU takes ten times as long for a launch."""
    found = on_virtual_gpu(
        """
        from fakedist.gpu.driver_clock import DriverClock
        from fakedist.record.machine_score import linear_over_pace, machine_score
        pace_us = DriverClock().pace_us
        import dataclasses, random
        kept = torch.ones(1, device="cuda")
        def states():
            memory = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            return [torch.get_rng_state().tolist(), torch.cuda.get_rng_state().tolist(), random.getstate(), memory]
        torch.set_grad_enabled(False)
        before = states()
        score, found["linear_us"] = machine_score(pace_us), linear_over_pace(pace_us) * pace_us()
        found["same"] = before == states() and not torch.is_grad_enabled()
        found["score"] = dataclasses.asdict(score)
        """
    )
    assert found["same"]
    score = found["score"]
    assert 0 < score["python_us"] < score["operator_us"] < score["linear_us"]
    assert score["spread"] >= 0
    assert score["python_us"] < found["linear_us"]
