"""Advice is taken, and gives what it said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunFakedist

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LLAMA = ("llama_fsdp2.py", "--model", "debug", "--num-layers", "8", "--seq-len", "4096", "--tp", "1")

pytestmark = pytest.mark.integration


def profile(run_fakedist: RunFakedist, *script: str, page: bool = False) -> dict[str, Any]:
    place = ("--world-size", "8", "--rank", "0", "--device", "virtual")
    return run_fakedist("profile", *place, "--json", EXAMPLES / script[0], *script[1:], page=page).json()


def test_a_checkpoint_lowers_the_peak_by_what_the_advice_said(run_fakedist: RunFakedist) -> None:
    before = profile(run_fakedist, *LLAMA, "--checkpoint", "none")
    after = profile(run_fakedist, *LLAMA, "--checkpoint", "full", page=True)
    advice = {piece["rule"]: piece["gives_bytes"] for piece in before["advice"]}
    given = before["peak_allocated_bytes"] - after["peak_allocated_bytes"]
    assert advice["checkpoint"] == pytest.approx(given, rel=0.02)
    assert "checkpoint" not in {piece["rule"] for piece in after["advice"]}
    assert not (Path(before["run_directory"]) / "report.html").exists()
    assert (Path(after["run_directory"]) / "report.html").is_file()
